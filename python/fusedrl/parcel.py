"""Tensordicts on the way to another process: one pickle, and one piece of memory.

The rows of a ragged column are views of one storage, which a pickle of its own would carry once a
row; and each tensor in a pickle costs as much as a small message.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64


class Group(NamedTuple):
    """Tensors that lie one after the other in memory, and differ in their first dimension alone."""

    dtype: torch.dtype
    inner: tuple[int, ...]  # their shape without the first dimension
    lengths: list[int] | int  # of their first dimension; how many they are if they have none
    offset: int  # in memory, in bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of them as one tensor."""
        rows = self.lengths if isinstance(self.lengths, int) else sum(self.lengths)
        return rows, *self.inner


class Contents(NamedTuple):
    """What makes values of memory: ``structure`` is a pickle that has tensors by number."""

    structure: bytes
    groups: list[Group]
    order: list[int]  # a tensor's number -> its place, group after group
    nbytes: int


class Parcel(NamedTuple):
    """Contents and their memory, to be sent; ``device`` is that of the first tensor, if any."""

    contents: Contents
    memory: np.ndarray[Any, Any]
    device: torch.device | None


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if type(obj) is not Tensor or obj.layout != torch.strided or obj.is_nested:
            return None  # what holds others is taken apart
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.tensors)
            self.tensors.append(obj)
        return self._numbers[id(obj)]

    def reducer_override(self, obj: Any) -> Any:
        # torch's own restores a view of the storage from its start, whatever it was a view of.
        if type(obj) is Tensor and obj.is_nested and obj.layout == torch.strided:
            return _strided, (obj.unbind(),)
        return NotImplemented


def _strided(rows: tuple[Tensor, ...]) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows), layout=torch.strided)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]


def take_apart(value: Any) -> tuple[Contents, list[list[Tensor]]]:
    """The contents of a value, and the tensors of each group."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    members: dict[Any, list[int]] = {}
    for number, tensor in enumerate(pickler.tensors):
        inner = tuple(tensor.shape[1:]) if tensor.dim() else None
        members.setdefault((tensor.dtype, inner), []).append(number)
    groups: list[Group] = []
    parts: list[list[Tensor]] = []
    offset = 0
    order = [0] * len(pickler.tensors)
    place = 0
    for (dtype, inner), numbers in members.items():
        tensors = [pickler.tensors[number].detach() for number in numbers]
        lengths = len(numbers) if inner is None else [len(tensor) for tensor in tensors]
        for number in numbers:
            order[number] = place
            place += 1
        group = Group(dtype, inner or (), lengths, offset)
        size = math.prod(group.shape) * dtype.itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
        groups.append(group)
        parts.append(tensors)
    return Contents(file.getvalue(), groups, order, max(offset, ALIGNMENT)), parts


def copy_into(memory: Tensor, contents: Contents, parts: Sequence[Sequence[Tensor]]) -> None:
    """Write the tensors of each group to where they belong in a flat tensor of bytes."""
    for whole, tensors in zip(_wholes(memory, contents), parts, strict=True):
        tensors = [tensor[None] for tensor in tensors] if not tensors[0].dim() else tensors
        if any(tensor.device != whole.device for tensor in tensors):
            whole.copy_(torch.cat([tensor.to(tensors[0].device) for tensor in tensors]))
        else:
            torch.cat(list(tensors), out=whole)


def put_together(contents: Contents, memory: Tensor) -> Any:
    """The value again; its tensors are views of a flat tensor of bytes."""
    parts: list[Tensor] = []
    for group, whole in zip(contents.groups, _wholes(memory, contents), strict=True):
        if isinstance(group.lengths, int):
            parts += whole.unbind()
        else:
            parts += whole.split_with_sizes(group.lengths)
    tensors = [parts[place] for place in contents.order]
    return _Unpickler(io.BytesIO(contents.structure), tensors).load()


def _wholes(memory: Tensor, contents: Contents) -> list[Tensor]:
    wholes = []
    for group in contents.groups:
        size = math.prod(group.shape) * group.dtype.itemsize
        flat = memory[group.offset : group.offset + size].view(group.dtype)
        wholes.append(flat.view(group.shape))
    return wholes


def pack(value: Any) -> Parcel:
    """``value`` with its dense tensors copied to the CPU, without their gradient graphs."""
    contents, parts = take_apart(value)
    memory = torch.empty(contents.nbytes, dtype=torch.uint8)
    copy_into(memory, contents, parts)
    device = parts[0][0].device if parts else None
    return Parcel(contents, memory.numpy(), device)


def unpack(parcel: Parcel) -> Any:
    """What was packed; tensors are views of one piece of memory."""
    # The memory of a message is read-only, hence a copy.
    memory = torch.from_numpy(parcel.memory.copy())
    return put_together(parcel.contents, memory)
