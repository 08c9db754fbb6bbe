"""The rows of a turn, one for each dialog: what is read from them and written into them.

What runs for every row of every turn avoids tensordict's checks of names and shapes, to save time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
    is_tensorclass,
)
from torch import Tensor

from fusedrl.collectors.trees import TREES

IDS = ("collector", "traj_ids")


def rows_of(turn: TensorDictBase, own: bool = False) -> list[TensorDictBase]:
    """The elements along all batch dimensions, in order, as views.

    Args:
        turn: a turn of all dialogs.
        own: whether each element gets a copy of the objects that stand for several elements.
    """
    if not turn.batch_dims:
        return [turn]
    return TREES.rows_of(turn if turn.batch_dims == 1 else turn.reshape(-1), own)


def ended(turn: TensorDictBase) -> Tensor:
    """Whether the turn is the last of each dialog, in the shape of the batch."""
    found = None
    if isinstance(turn, LazyStackedTensorDict) and turn.stack_dim == 0:
        found = TREES.under(turn.tensordicts, "next", "done")
    done = turn.get(("next", "done")) if found is None else torch.stack(found)
    if done.numel() == turn.numel():
        return done.reshape(turn.batch_size)
    return done.reshape(*turn.batch_size, -1).any(-1)


def tag(rows: list[Any], traj_ids: Sequence[Tensor]) -> None:
    """Write the id of its trajectory into each row."""
    if not TREES.nest(rows, *IDS, traj_ids):
        for row, traj_id in zip(rows, traj_ids, strict=True):
            row.set(IDS, traj_id)


def private_keys(row: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Keys with a part that begins with ``_``; for stacked rows, those of the first row."""
    while isinstance(row, LazyStackedTensorDict) or is_tensorclass(row):
        row = row._tensordict if is_tensorclass(row) else row.tensordicts[0]
    for key, value in row.items():
        if key.startswith("_"):
            yield (*path, key)
        elif is_tensor_collection(value) and not is_non_tensor(value):
            yield from private_keys(value, (*path, key))
