"""What is in a turn: its rows, one for each dialog, what is written into them, and copies.

What runs for every row of every turn is C++, and avoids tensordict's checks of names and shapes.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from fusedrl._host import TreeKind, Trees
from fusedrl.compat.tensordict import is_as_known, tensordict_of

IDS = ("collector", "traj_ids")

Columns = list[list[Tensor]]


def _kind_of(kind: type) -> TreeKind:
    if issubclass(kind, Tensor):
        return TreeKind.tensor_subclass
    if not is_as_known():
        return TreeKind.other
    if kind is TensorDict:
        return TreeKind.dict
    if kind is LazyStackedTensorDict or kind is NonTensorStack:
        return TreeKind.stack
    return TreeKind.tensorclass if is_tensorclass(kind) else TreeKind.other


_TREES = Trees(Tensor, _kind_of, lambda value: value.clone(), copy.deepcopy)


def rows_of(turn: TensorDictBase, own: bool = False) -> list[TensorDictBase]:
    """The elements along all batch dimensions, in order, as views.

    Args:
        turn: a turn of all dialogs.
        own: whether each element gets a copy of the objects that stand for several elements.
    """
    if not turn.batch_dims:
        return [turn]
    return _TREES.rows_of(turn if turn.batch_dims == 1 else turn.reshape(-1), own)


def ended(turn: TensorDictBase) -> Tensor:
    """Whether the turn is the last of each dialog, in the shape of the batch."""
    parts = None
    if isinstance(turn, LazyStackedTensorDict) and turn.stack_dim == 0:
        parts = _TREES.under(turn.tensordicts, "next", "done")
    done = turn.get(("next", "done")) if parts is None else torch.stack(parts)
    if done.numel() == turn.numel():
        return done.reshape(turn.batch_size)
    return done.reshape(*turn.batch_size, -1).any(-1)


def tag(rows: list[Any], traj_ids: Sequence[Tensor]) -> None:
    """Write the id of its trajectory into each row."""
    if not _TREES.nest(rows, *IDS, traj_ids):
        for row, traj_id in zip(rows, traj_ids, strict=True):
            row.set(IDS, traj_id)


def private_keys(row: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys with a part that begins with ``_``; for stacked rows, those of the first row."""
    while isinstance(row, LazyStackedTensorDict) or is_tensorclass(row):
        row = tensordict_of(row) if is_tensorclass(row) else row.tensordicts[0]
    for key, value in row.items():
        if key.startswith("_"):
            yield (*path, key)
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from private_keys(value, (*path, key))


class TurnCopies:
    """Copies a turn before and after an environment has stepped with it.

    Neither the policy nor the environment writes into the copies. A tensor that was copied before
    the step is not copied again, so that what the environment writes into it is in no copy. Tensors
    under ``"next"`` are copied after the step only, because an environment may return a tensor that
    it was given.
    """

    def __init__(self) -> None:
        self._originals: Columns = []
        self._clones: Columns = []

    def before(self, value: Any) -> None:
        """Copy the input of an environment, before it steps."""
        self._originals = _TREES.columns(value)
        self._clones = _clones_of(self._originals)

    def after(self, value: Any) -> Any:
        """A copy of a tensordict, with memory of its own for every tensor in it."""
        return _TREES.copy(value, self._cloned)

    def _cloned(self, root: Columns, under_next: Columns) -> Columns:
        if not self._originals:
            return _clones_of(root + under_next)
        if len(self._originals) == len(root) and all(map(_are_same, self._originals, root)):
            clones, self._clones = self._clones, []  # none is given away twice
            return clones + _clones_of(under_next)
        known = self._by_original()
        if not any(id(tensor) in known for tensor in chain(*root)):
            return _clones_of(root + under_next)
        clones = [
            [made.popleft() if (made := known.get(id(t))) else t.clone() for t in column]
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
    return [[tensor.clone() for tensor in column] for column in columns]
