"""Serializes tensordicts for another process: one pickle, and one piece of memory.

An ordinary pickle has the class, the attributes and the keys of every row of a stack, and the
storage of a ragged column once for each row. Here all rows of one class with the same keys form one
column, and so do their values under each key. The pickle has only the numbers of tensors, which lie
in one piece of memory. ``docs/benchmarks.md`` compares this with other libraries.

In the pickle, a column is a call that returns the list of its values: :class:`Packer` writes calls
of the functions at the end of this file, and unpickling makes them.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
from collections.abc import Callable, Hashable, Iterable
from functools import cache, partial
from itertools import accumulate, chain, islice, pairwise, repeat
from operator import attrgetter, itemgetter, mul
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
)
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from fusedrl.compat import tensordict as compat

# Positions of tensors: a group with the first index and the end; or a group and index for each.
Places = tuple[int, int, int] | list[tuple[int, int]]
ALIGNMENT = 64
_QUANTISED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
_CONSTANTS = {type(None), bool, int, str, torch.Size, torch.device}


class Group(NamedTuple):
    """The tensors of one dtype and device, one after the other from byte ``offset`` on."""

    dtype: torch.dtype
    offset: int
    shapes: list[torch.Size]

    def tensors(self, memory: np.ndarray[Any, Any]) -> list[Tensor]:
        """The tensors, as separate views of ``memory``, a flat uint8 array."""
        try:
            kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        except TypeError:  # numpy lacks this dtype
            kind = np.dtype(f"i{self.dtype.itemsize}")
        ends = [*accumulate(map(math.prod, self.shapes), initial=0)]
        whole = memory[self.offset : self.offset + ends[-1] * kind.itemsize].view(kind)
        arrays = [
            whole[start:stop] if len(shape) == 1 else whole[start:stop].reshape(shape)
            for (start, stop), shape in zip(pairwise(ends), self.shapes, strict=True)
        ]
        tensors = list(map(torch.from_numpy, arrays))
        return tensors if tensors[0].dtype == self.dtype else [t.view(self.dtype) for t in tensors]


class Contents(NamedTuple):
    """What restores a value from ``nbytes`` of memory: a pickle, and where each tensor is."""

    structure: bytes
    groups: list[Group]
    nbytes: int


class Serialized(NamedTuple):
    """Contents and their memory, to send; ``device`` is that of the first tensor, if any."""

    contents: Contents
    memory: np.ndarray[Any, Any]
    device: torch.device | None


class Call(NamedTuple):
    """A function call that is made when the pickle is read."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


class Packer(pickle.Pickler):
    """Splits a value into ``contents`` and the tensors to copy.

    A tensor that occurs twice stays one; a tensordict becomes two. The outermost lock is kept.

    Args:
        value: anything that can be pickled.
        share: whether CUDA tensors stay where they are, for a process on this machine.
    """

    def __init__(self, value: Any, share: bool = False) -> None:
        file = io.BytesIO()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._share = share
        self._members: dict[tuple[torch.dtype, torch.device], tuple[int, list[Tensor]]] = {}
        self._places: dict[int, tuple[int, int]] = {}  # by id; the members keep tensors alive
        self.dump(value)
        groups: list[Group] = []
        offset = 0
        known: dict[torch.Size, torch.Size] = {}  # pickle stores one object once
        for (dtype, _), (_, members) in self._members.items():
            shapes = [known.setdefault(shape, shape) for shape in map(attrgetter("shape"), members)]
            groups.append(Group(dtype, offset, shapes))
            nbytes = sum(map(math.prod, shapes)) * dtype.itemsize
            offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self.contents = Contents(file.getvalue(), groups, max(offset, ALIGNMENT))

    @property
    def device(self) -> torch.device | None:
        """The device of the first tensor."""
        return next((device for _, device in self._members), None)

    @torch.no_grad()
    def copy(self, memory: Tensor) -> None:
        """Write all tensors to ``memory``, a flat tensor of ``contents.nbytes`` bytes."""
        for group, (_, members) in zip(self.contents.groups, self._members.values(), strict=True):
            flat = [t.reshape(-1) if t.ndim != 1 else t for t in members]
            nbytes = sum(map(Tensor.numel, flat)) * group.dtype.itemsize
            whole = memory[group.offset : group.offset + nbytes].view(group.dtype)
            if flat[0].device == whole.device:
                torch.cat(flat, out=whole)
            else:
                whole.copy_(torch.cat(flat))

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle an object with special handling: as a function and its arguments."""
        cls = type(obj)
        if cls is Call:
            return obj
        if _is_record(cls):
            return Call(_only, (self._records(cls, [obj]), obj.is_locked))
        if isinstance(obj, MemoryMappedTensor):  # its file may be gone by then
            obj = obj.as_subclass(Tensor)
        if type(obj) is not Tensor:
            return NotImplemented
        if self._are_dense([obj]):
            return Call(_only, (self._tensors([obj]),))
        if self._share and obj.is_cuda:
            return reduce_tensor(obj.detach())  # the memory stays where it is
        if obj.is_nested and obj.layout == torch.strided:
            # pickle itself would restore a view at the start of its storage, not at its offset.
            return Call(torch.nested.as_nested_tensor, (obj.detach().unbind(), obj.dtype))
        return NotImplemented

    def _are_dense(self, tensors: list[Tensor]) -> bool:
        """Whether all tensors are plain memory that is to be copied."""
        return not any(
            t.layout != torch.strided
            or (t.is_nested or t.is_meta or t.dtype in _QUANTISED)
            or (self._share and t.is_cuda)
            for t in tensors
        )

    def _tensors(self, tensors: list[Tensor]) -> Call:
        for tensor in tensors:
            if id(tensor) not in self._places:
                key = tensor.dtype, tensor.device
                number, members = self._members.setdefault(key, (len(self._members), []))
                self._places[id(tensor)] = number, len(members)
                members.append(tensor)
        found: Any = [self._places[id(tensor)] for tensor in tensors]
        group, start = found[0]
        if found == [(group, n) for n in range(start, start + len(found))]:
            found = group, start, start + len(found)
        return Call(_tensors_of, (found,))

    def _column(self, values: list[Any]) -> Any:
        classes = set(map(type, values))
        if len(classes) > 1:
            return self._mixed(values, map(type, values), self._column)
        for cls in classes:  # one, or none
            if cls is Tensor and self._are_dense(values):
                return self._tensors(values)
            if _is_record(cls):
                return self._records(cls, values)
        return values

    def _mixed(
        self, values: list[Any], kinds: Iterable[Hashable], column: Callable[[list[Any]], Any]
    ) -> Call:
        """A column for the values of each kind."""
        indices: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(kinds):
            indices.setdefault(kind, []).append(index)
        columns = [column([values[i] for i in of_kind]) for of_kind in indices.values()]
        return Call(_mixed, (list(indices.values()), columns))

    def _records(self, cls: type, records: list[Any]) -> Call:
        states = self._dicts(list(map(vars, records)), partial(self._attribute, cls))
        return Call(_records_of, (cls, states))

    def _attribute(self, cls: type, name: str, values: list[Any]) -> Any:
        """A column with one attribute of all records; ``None`` if it is left out."""
        if name in compat.CACHES:
            return None
        if name == compat.LOCKED:  # None: a stack reads it from its rows
            return _plain([False if cls is TensorDict else None] * len(values))
        if name == compat.ROWS:
            rows = self._column(list(chain.from_iterable(values)))
            return Call(_lists, (list(map(len, values)), rows))
        if name == compat.ENTRIES and type(values[0]) is dict:
            return self._dicts(values, lambda _, column: self._column(column))
        if name == compat.ENTRIES:
            return self._column(values)
        if name == compat.FIELDS:
            return self._dicts(values, lambda _, column: _plain(column))
        return _plain(values)

    def _dicts(self, values: list[Any], column: Callable[[str, list[Any]], Any]) -> Call:
        kinds = set(map(tuple, values))
        if len(kinds) > 1:
            return self._mixed(values, map(tuple, values), lambda v: self._dicts(v, column))
        columns = {k: column(k, list(map(itemgetter(k), values))) for kind in kinds for k in kind}
        columns = {key: made for key, made in columns.items() if made is not None}
        return Call(_dicts, (len(values), tuple(columns), list(columns.values())))


@cache
def _is_record(cls: type) -> bool:
    """Whether the ``__dict__`` of its objects is all that a class pickles."""
    names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
    return cls in (TensorDict, LazyStackedTensorDict, NonTensorStack) or (
        is_tensorclass(cls) and all(getattr(cls, n) is getattr(NonTensorData, n) for n in names)
    )


def _plain(values: list[Any]) -> Any:
    """A column of values that are neither tensors nor tensordicts."""
    first, classes = values[0], set(map(type, values))
    # Values of two classes may be equal, as 1 and True are, or not comparable, as arrays are not.
    if len(classes) == 1 and classes <= _CONSTANTS and values.count(first) == len(values):
        return Call(mul, ([first], len(values)))
    return values


def put_together(contents: Contents, memory: np.ndarray[Any, Any]) -> Any:
    """Restore the value; its tensors are views of ``memory``, a flat uint8 array."""
    # With many new objects, the garbage collector would search all existing ones repeatedly.
    enabled = gc.isenabled()
    try:
        gc.disable()
        return _Unpickler(contents, memory).load()
    finally:
        if enabled:
            gc.enable()


def serialize(value: Any) -> Serialized:
    """Serialize a value; dense tensors are copied to the CPU, without autograd history."""
    packer = Packer(value)
    memory = torch.empty(packer.contents.nbytes, dtype=torch.uint8)
    packer.copy(memory)
    return Serialized(packer.contents, memory.numpy(), packer.device)


def deserialize(serialized: Serialized) -> Any:
    """The value that was serialized; its tensors lie in one piece of memory."""
    # Copied, since the memory of a message is read-only.
    return put_together(serialized.contents, serialized.memory.copy())


class _Unpickler(pickle.Unpickler):
    def __init__(self, contents: Contents, memory: np.ndarray[Any, Any]) -> None:
        super().__init__(io.BytesIO(contents.structure))
        self._groups = [group.tensors(memory) for group in contents.groups]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        # Not a bound method: the unpickler's memo would then keep itself and all tensors alive.
        return partial(found, self._groups) if found is _tensors_of else found


# Functions that a pickle calls while it is read.


def _only(values: list[Any], locked: bool = False) -> Any:
    return values[0].lock_() if locked else values[0]


def _tensors_of(groups: list[list[Tensor]], places: Places) -> list[Tensor]:
    if isinstance(places, list):
        return [groups[group][index] for group, index in places]
    group, start, stop = places
    return groups[group][start:stop]


def _mixed(indices: list[list[int]], columns: list[list[Any]]) -> list[Any]:
    found: dict[int, Any] = {}
    for of_kind, column in zip(indices, columns, strict=True):
        found.update(zip(of_kind, column, strict=True))
    return [found[index] for index in range(len(found))]


def _lists(lengths: list[int], elements: list[Any]) -> list[list[Any]]:
    values = iter(elements)
    return [list(islice(values, length)) for length in lengths]


def _dicts(count: int, keys: tuple[str, ...], columns: list[list[Any]]) -> list[dict[str, Any]]:
    if not keys:
        return [{} for _ in range(count)]
    return list(map(dict, map(zip, repeat(keys), zip(*columns, strict=True))))


def _records_of(cls: Any, states: list[dict[str, Any]]) -> list[Any]:
    records = [cls.__new__(cls) for _ in states]
    for record, state in zip(records, states, strict=True):
        object.__setattr__(record, "__dict__", state)
    return records
