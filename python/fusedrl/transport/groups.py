"""Copies many tensors into one piece of memory, one after the other, in few operations.

An operation for each tensor would cost more than the copy of its values.
"""

from __future__ import annotations

import math
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fusedrl.compat.torch import strided_layout, strided_sizes, strided_view

ALIGNMENT = 64

# Where tensors are: the number of their group, the index of the first and that after the last; or,
# where they are in several groups, the group and the index of each.
Places = tuple[int, int, int] | list[tuple[int, int]]


class _NumpyTypes(dict[torch.dtype, Any]):
    """The dtypes of numpy for those of torch; integers of their size for those it lacks."""

    def __missing__(self, dtype: torch.dtype) -> Any:
        try:
            self[dtype] = torch.empty(0, dtype=dtype).numpy().dtype
        except TypeError:
            self[dtype] = np.dtype(f"i{dtype.itemsize}")
        return self[dtype]


_NUMPY = _NumpyTypes()
_shape, _dtype, _layout, _is_cpu = map(attrgetter, ("shape", "dtype", "layout", "is_cpu"))
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}


class Group(NamedTuple):
    """Where the tensors of one group lie in memory: one after the other from byte ``offset`` on."""

    dtype: torch.dtype
    offset: int
    shapes: list[torch.Size]

    @property
    def sizes(self) -> list[int]:
        """The number of elements of each tensor."""
        return list(map(math.prod, self.shapes))

    def whole(self, memory: Tensor) -> Tensor:
        """All of them as one flat tensor: a view of a flat tensor of bytes."""
        nbytes = sum(self.sizes) * self.dtype.itemsize
        return memory[self.offset : self.offset + nbytes].view(self.dtype)

    def tensors(self, memory: np.ndarray[Any, Any]) -> list[Tensor]:
        """Each tensor of the group, over its own part of a flat array of bytes.

        Their storages are separate, so that a pickle or a copy of one has nothing of the others.
        """
        ends = [*accumulate(self.sizes, initial=0)]
        values = memory[self.offset : self.offset + ends[-1] * self.dtype.itemsize]
        whole = values.view(_NUMPY[self.dtype])
        arrays = [
            whole[start:stop] if len(shape) == 1 else whole[start:stop].reshape(shape)
            for (start, stop), shape in zip(pairwise(ends), self.shapes, strict=True)
        ]
        tensors = list(map(torch.from_numpy, arrays))
        if tensors[0].dtype != self.dtype:
            return [tensor.view(self.dtype) for tensor in tensors]
        return tensors


class TensorGroups:
    """Collects tensors that are to be copied into memory, grouped by dtype and device.

    Args:
        share: whether to leave out tensors on CUDA devices, which then stay where they are.
    """

    def __init__(self, share: bool = False) -> None:
        self._share = share
        self._members: dict[tuple[torch.dtype, torch.device], tuple[int, list[Tensor]]] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by id; the members keep tensors alive

    def add(self, tensors: list[Tensor]) -> Places | None:
        """Add tensors and return where they are, or ``None`` if some are not plain memory."""
        try:
            list(map(_shape, tensors))
        except RuntimeError:  # strided nested tensors have none
            return None
        dtypes, layouts = set(map(_dtype, tensors)), set(map(_layout, tensors))
        if layouts != {torch.strided} or not dtypes.isdisjoint(_QUANTISED):
            return None
        on_cpu = all(map(_is_cpu, tensors))
        if not on_cpu and any(tensor.is_meta or self._share for tensor in tensors):
            return None
        ids = list(map(id, tensors))
        fresh = len(set(ids)) == len(ids) and self._places.keys().isdisjoint(ids)
        if fresh and on_cpu and len(dtypes) == 1:
            return self._append(tensors, ids)
        for key, tensor in zip(ids, tensors, strict=True):
            if key not in self._places:
                self._append([tensor], [key])
        return [self._places[key] for key in ids]

    def _append(self, tensors: list[Tensor], ids: list[int]) -> tuple[int, int, int]:
        """Add tensors of one dtype and device."""
        key = tensors[0].dtype, tensors[0].device
        number, members = self._members.setdefault(key, (len(self._members), []))
        start, stop = len(members), len(members) + len(tensors)
        members += tensors
        self._places.update(zip(ids, zip(repeat(number), range(start, stop)), strict=True))
        return number, start, stop

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor."""
        return next((device for _, device in self._members), None)

    def layout(self) -> tuple[list[Group], int]:
        """The groups with their offsets, and how many bytes they need, which is never 0."""
        groups: list[Group] = []
        offset = 0
        known: dict[torch.Size, torch.Size] = {}  # equal shapes are one object in the pickle
        for (dtype, _), (_, members) in self._members.items():
            shapes = [known.setdefault(shape, shape) for shape in map(_shape, members)]
            groups.append(Group(dtype, offset, shapes))
            offset += -(-sum(groups[-1].sizes) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return groups, max(offset, ALIGNMENT)

    @torch.no_grad()
    def copy(self, groups: list[Group], memory: Tensor) -> None:
        """Write all tensors to a flat tensor of bytes, each where :meth:`layout` puts it."""
        for group, (_, members) in zip(groups, self._members.values(), strict=True):
            whole = group.whole(memory)
            flat = [t.reshape(-1) if t.ndim != 1 else t for t in members]
            if flat[0].device == whole.device:
                torch.cat(flat, out=whole)
            else:
                whole.copy_(torch.cat(flat))


def nested_parts(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a strided nested tensor consists of: values, and the sizes, strides, offsets of rows."""
    tensor = tensor.detach()
    sizes = strided_sizes(tensor)
    if not tensor.is_contiguous() or tensor.values().numel() != int(sizes.prod(1).sum()):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.values(), sizes, *strided_layout(tensor)


def nested_view(values: Tensor, sizes: Tensor, strides: Tensor, offsets: Tensor) -> Tensor:
    """A strided nested tensor over ``values``, which have a storage of their own."""
    if values.storage_offset():  # torch finds the rows from the start of the storage
        values = values.clone()
    return strided_view(values, sizes, strides, offsets)
