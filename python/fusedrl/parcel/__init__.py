"""Tensordicts on the way to another process: one pickle, and one piece of memory.

The rows of a ragged column are views of one storage, which a pickle of its own would carry once a
row; and each tensor in a pickle costs as much as a small message.
"""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedrl.parcel.columns import ColumnPickler, ColumnUnpickler
from fusedrl.parcel.groups import Group, TensorGroups

__all__ = ["Contents", "Parcel", "pack", "put_together", "take_apart", "unpack"]


class Contents(NamedTuple):
    """What makes a value of ``nbytes`` of memory: a pickle, and where its tensors lie."""

    structure: bytes
    groups: list[Group]
    nbytes: int


class Parcel(NamedTuple):
    """Contents and their memory, to be sent; ``device`` is that of the first tensor, if any."""

    contents: Contents
    memory: np.ndarray[Any, Any]
    device: torch.device | None


def take_apart(value: Any, share: bool = False) -> tuple[Contents, TensorGroups]:
    """The contents of a value, and its dense tensors, which are to be copied into memory.

    Args:
        value: anything that can be pickled.
        share: whether CUDA tensors stay where they are, for a process on this machine.
    """
    file, tensors = io.BytesIO(), TensorGroups(share)
    ColumnPickler(file, tensors).write(value)
    return Contents(file.getvalue(), *tensors.layout()), tensors


def put_together(contents: Contents, memory: Tensor) -> Any:
    """The value again; its tensors are views of a flat tensor of bytes."""
    tensors = [group.views(memory) for group in contents.groups]
    return ColumnUnpickler(io.BytesIO(contents.structure), tensors).read()


def pack(value: Any) -> Parcel:
    """``value`` with its dense tensors copied to the CPU, without their gradient graphs."""
    contents, tensors = take_apart(value)
    memory = torch.empty(contents.nbytes, dtype=torch.uint8)
    tensors.copy(contents.groups, memory)
    return Parcel(contents, memory.numpy(), tensors.device)


def unpack(parcel: Parcel) -> Any:
    """What was packed; its tensors are views of one piece of memory."""
    # The memory of a message is read-only, hence a copy.
    return put_together(parcel.contents, torch.from_numpy(parcel.memory.copy()))
