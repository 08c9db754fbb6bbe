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
    """Where the tensors of one group lie in memory: from byte ``offset`` on.

    The tensors have one of three forms. Without dimensions, there are ``count`` of them. With the
    same ``inner`` dimensions behind the first one, ``lengths`` are their sizes along the first.
    With any ``shapes``, ``lengths`` are their numbers of elements.
    """

    dtype: torch.dtype
    offset: int
    count: int
    lengths: list[int] | None
    inner: tuple[int, ...]
    shapes: list[torch.Size] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all of them as one tensor."""
        return (self.count if self.lengths is None else sum(self.lengths), *self.inner)

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        return math.prod(self.shape) * self.dtype.itemsize

    def whole(self, memory: Tensor) -> Tensor:
        """All of them as one tensor: a view of a flat tensor of bytes."""
        values = memory[self.offset : self.offset + self.nbytes]
        return values.view(self.dtype).view(self.shape)

    def tensors(self, memory: np.ndarray[Any, Any]) -> list[Tensor]:
        """Each tensor of the group, over its own part of a flat array of bytes.

        Their storages are separate, so that a pickle or a copy of one has nothing of the others.
        """
        values = memory[self.offset : self.offset + self.nbytes]
        whole = values.view(_NUMPY[self.dtype]).reshape(self.shape)
        if self.lengths is None:
            arrays = [whole[index, ...] for index in range(self.count)]
        else:
            ends = accumulate(self.lengths, initial=0)
            arrays = [whole[start:stop] for start, stop in pairwise(ends)]
        if self.shapes is not None:
            arrays = [array.reshape(s) for array, s in zip(arrays, self.shapes, strict=True)]
        tensors = list(map(torch.from_numpy, arrays))
        if tensors and tensors[0].dtype != self.dtype:
            return [tensor.view(self.dtype) for tensor in tensors]
        return tensors


class _Members:
    """The tensors of a group, and their shapes."""

    def __init__(self, dtype: torch.dtype, inner: torch.Size | None, flat: bool) -> None:
        self.dtype, self.inner, self.flat = dtype, inner, flat
        self.tensors: list[Tensor] = []
        self.shapes: list[torch.Size] = []

    def group(self, offset: int) -> Group:
        """The group, from ``offset`` in memory on."""
        count, lengths, shapes = len(self.tensors), None, None
        if self.flat:
            lengths, shapes = [shape.numel() for shape in self.shapes], self.shapes
        elif self.inner is not None:
            lengths = [shape[0] for shape in self.shapes]
        return Group(self.dtype, offset, count, lengths, tuple(self.inner or ()), shapes)

    def copy(self, whole: Tensor) -> None:
        """Write them into one tensor of the group's shape."""
        tensors = self.tensors
        if self.flat:
            tensors = [tensor.reshape(-1) for tensor in tensors]
        concatenate = torch.cat if self.inner is not None or self.flat else torch.stack
        if tensors[0].device == whole.device:
            concatenate(tensors, out=whole)
        else:
            whole.copy_(concatenate(tensors))


class TensorGroups:
    """Collects tensors that are to be copied into memory, grouped by dtype and inner shape.

    Args:
        share: whether to leave out tensors on CUDA devices, which then stay where they are.
    """

    def __init__(self, share: bool = False) -> None:
        self._share = share
        self._members: dict[Any, tuple[int, _Members]] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by id; the members keep tensors alive

    def add(self, tensors: list[Tensor]) -> Places | None:
        """Add tensors and return where they are, or ``None`` if some are not plain memory."""
        try:
            shapes = list(map(_shape, tensors))
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
            return self._append(tensors, ids, shapes)
        for key, tensor, shape in zip(ids, tensors, shapes, strict=True):
            if key not in self._places:
                self._append([tensor], [key], [shape])
        return [self._places[key] for key in ids]

    def _append(
        self, tensors: list[Tensor], ids: list[int], shapes: list[torch.Size]
    ) -> tuple[int, int, int]:
        """Add tensors of one dtype and device."""
        inner = {shape[1:] if shape else None for shape in set(shapes)}
        flat = len(inner) > 1
        kind = tensors[0].dtype, None if flat else inner.pop(), flat
        key = *kind, tensors[0].device
        if key not in self._members:
            self._members[key] = len(self._members), _Members(*kind)
        number, members = self._members[key]
        start = len(members.tensors)
        members.tensors += tensors
        members.shapes += shapes
        stop = len(members.tensors)
        self._places.update(zip(ids, zip(repeat(number), range(start, stop)), strict=True))
        return number, start, stop

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor."""
        for _, members in self._members.values():
            return members.tensors[0].device
        return None

    def layout(self) -> tuple[list[Group], int]:
        """The groups with their offsets, and how many bytes they need, which is never 0."""
        groups: list[Group] = []
        offset = 0
        for _, members in self._members.values():
            groups.append(members.group(offset))
            offset += -(-groups[-1].nbytes // ALIGNMENT) * ALIGNMENT
        return groups, max(offset, ALIGNMENT)

    @torch.no_grad()
    def copy(self, groups: list[Group], memory: Tensor) -> None:
        """Write all tensors to a flat tensor of bytes, each where :meth:`layout` puts it."""
        for group, (_, members) in zip(groups, self._members.values(), strict=True):
            members.copy(group.whole(memory))


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
