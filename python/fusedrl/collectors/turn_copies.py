"""Copies of turns that neither the policy nor the environment writes into afterwards."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fusedrl.collectors.trees import TREES

# Small tensors are cloned together, into one piece of memory. A clone that is kept keeps all of it,
# so the bytes of a tensor and the number of tensors are bounded.
SMALL = 256  # bytes of a tensor
MANY = 64
FEW = 4  # fewer tensors than that are cloned one by one

Columns = list[list[Tensor]]


class TurnCopies:
    """Copies a turn before and after an environment has stepped with it.

    A tensor that was copied before the step is not copied again, so that what the environment
    writes into it is in no copy. Tensors under ``"next"`` are copied after the step only, because
    an environment may return a tensor that it was given.
    """

    def __init__(self) -> None:
        self._originals: Columns = []
        self._clones: Columns = []

    def before(self, value: Any) -> None:
        """Copy the input of an environment, before it steps."""
        self._originals = TREES.columns(value)
        self._clones = _clones_of(self._originals)

    def after(self, value: Any) -> Any:
        """A copy of a tensordict, with memory of its own for every tensor in it."""
        return TREES.copy(value, self._cloned)

    def _cloned(self, root: Columns, under_next: Columns) -> Columns:
        if not self._originals:
            return _clones_of(root + under_next)
        originals = self._originals
        if len(originals) == len(root) and all(map(_are_same, originals, root)):
            clones, self._clones = (
                self._clones,
                [],
            )  # none is given away twice
        else:
            known = self._by_original()
            if not any(id(tensor) in known for tensor in chain(*root)):
                return _clones_of(root + under_next)
            clones = [
                [ours.popleft() if (ours := known.get(id(t))) else t.clone() for t in column]
                for column in root
            ]
        return clones + _clones_of(under_next)

    def _by_original(self) -> dict[int, deque[Tensor]]:
        """The clones made before the step, by the id of the original; each is given away once."""
        clones: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        for original, clone in zip(chain(*self._originals), chain(*self._clones), strict=True):
            clones[id(original)].append(clone)
        return clones


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _clones_of(columns: Columns) -> Columns:
    """A clone of each tensor; small tensors of the same kind are cloned together."""
    clones: Columns = [[]] * len(columns)
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for index, column in enumerate(columns):
        first = column[0]
        if len(column) == 1 or first.numel() * first.element_size() > SMALL:
            clones[index] = [tensor.clone() for tensor in column]
        else:
            alike[first.dtype, first.shape, first.device].append(index)
    for indices in alike.values():
        made = _clones_of_small([tensor for index in indices for tensor in columns[index]])
        begin = 0
        for index in indices:
            end = begin + len(columns[index])
            clones[index] = made[begin:end]
            begin = end
    return clones


def _clones_of_small(tensors: list[Tensor]) -> list[Tensor]:
    if len(tensors) < FEW:
        return [tensor.clone() for tensor in tensors]
    made: list[Tensor] = []
    for begin in range(0, len(tensors), MANY):
        some = tensors[begin : begin + MANY]
        try:
            stacked = torch.stack(some)
        except RuntimeError:  # they have several shapes or devices
            made += [tensor.clone() for tensor in some]
            continue
        if stacked.requires_grad:
            made += stacked.unbind(0)
            continue
        # Views of one tensor share a version counter, so that autograd would take a change of one
        # for a change of another. Within this guard they get counters of their own.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            made += stacked.unbind(0)
    return made
