"""Copies of turns that neither the policy nor the environment writes into afterwards."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fusedrl.collectors.trees import TREES

# Small tensors are cloned many at a time, into one memory: none keeps more than this of others.
SMALL = 256  # bytes of one of them
MANY = 64
FEW = 4  # fewer than that are cloned one by one

Columns = list[list[Tensor]]


class TurnCopies:
    """Copies of a turn before and after an environment has stepped with it.

    A tensor that was copied before is not copied again: what is written into it in the meantime is
    in no copy. Those under ``"next"`` are copied after the step only, as an environment may return
    what it was given.
    """

    def __init__(self) -> None:
        self._originals: Columns = []
        self._clones: Columns = []

    def before(self, value: Any) -> None:
        """Copy what an environment is given."""
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
            clones, self._clones = self._clones, []  # they are in the copy from now on
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
        """The clones of before, each to be given away once."""
        clones: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        for original, clone in zip(chain(*self._originals), chain(*self._clones), strict=True):
            clones[id(original)].append(clone)
        return clones


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(map(is_, tensors, others))


def _clones_of(columns: Columns) -> Columns:
    """Clones of each tensor; those of small ones that are alike are made together."""
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
        except RuntimeError:  # of several shapes or devices
            made += [tensor.clone() for tensor in some]
            continue
        if stacked.requires_grad:
            made += stacked.unbind(0)
            continue
        # Views of one tensor count their changes together, and autograd would take a change of one
        # for a change of another.
        with torch._C._AutoDispatchBelowADInplaceOrView():
            made += stacked.unbind(0)
    return made
