"""Copies of turns that neither the policy nor the environment writes into afterwards."""

from __future__ import annotations

from collections import defaultdict, deque
from itertools import chain, islice
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fusedrl.collectors.trees import TREES

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
            clones, self._clones = self._clones, []  # none is given away twice
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
    """A clone of each tensor, with a storage of its own.

    A pickle has the whole storage of each tensor in it, and a tensor that is kept keeps all of it.
    """
    tensors = list(chain(*columns))
    clones = iter(_clones_at_once(tensors) or [tensor.clone() for tensor in tensors])
    return [list(islice(clones, len(column))) for column in columns]


def _clones_at_once(tensors: list[Tensor]) -> list[Tensor] | None:
    """The clones by one call of torch, in two thirds of the time; ``None`` where it has no such."""
    if _clone_all is None or not tensors or any(type(tensor) is not Tensor for tensor in tensors):
        return None
    try:
        return list(_clone_all(tensors))
    except RuntimeError:  # of nested tensors, for example
        return None


_clone_all: Any = getattr(torch, "_foreach_clone", None)
