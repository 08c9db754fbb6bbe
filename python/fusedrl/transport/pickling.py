"""Pickles tensordicts column by column, and other values as usual.

The usual pickle names the class, the attributes and the keys of every row of a stack of
tensordicts, and builds each row from them. Here, all rows of one class with the same keys are one
column, and so are their values under each key. Tensors are not in the pickle, only their numbers.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

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
from fusedrl.transport.groups import Places, TensorGroups, nested_parts, nested_view

_CONSTANTS = {type(None), bool, int, str, torch.Size, torch.device}

# The name of the method of ColumnUnpickler that reads a column, and the arguments of that method.
Column = tuple[Any, ...]


class _Taken(dict[type, bool]):
    """Whether objects of a class consist of their ``__dict__`` alone; decided once for a class."""

    def __missing__(self, cls: type) -> bool:
        if cls in (TensorDict, LazyStackedTensorDict, NonTensorStack):
            taken = True
        else:  # a tensorclass that is pickled as all are
            names = ("__getstate__", "__setstate__", "__reduce__", "__reduce_ex__")
            taken = is_tensorclass(cls) and all(
                getattr(cls, name) is getattr(NonTensorData, name) for name in names
            )
        self[cls] = taken
        return taken


_taken = _Taken()


class _End:
    """Written after a column."""


class ColumnPickler(pickle.Pickler):
    """Writes one value to a file.

    Args:
        file: written to.
        tensors: gets the tensors.
    """

    def __init__(self, file: io.BytesIO, tensors: TensorGroups) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._places: dict[int, int] = {}  # by id: the index of the object among all
        self._starts: list[int] = []  # the first object of each column
        self._count = 0
        self._open = 0  # columns of which the end is not written yet
        self._locked: list[tuple[int, list[int]]] = []
        self._alive: list[Any] = []  # keeps objects, as an id means one object only while it exists

    def write(self, value: Any) -> None:
        """Write ``value``; a pickler writes one value only."""
        self.dump([value, self._locked])  # the list is full by the time it is written

    def persistent_id(self, obj: Any) -> tuple[Column, Any] | None:
        """What stands for a tensor or tensordict: a column of one."""
        cls = type(obj)
        if cls is Tensor:
            column = self._tensor_column([obj])
            return None if column is None else (column, None)
        if cls is _End:
            self._open -= 1
            return ("plain", [None]), None
        if not _taken[cls]:
            return None
        places = self._places
        if self._open:  # a payload is read before the columns around it, so it cannot refer to them
            self._places = {}
        column = self._object_column(cls, [obj])
        self._places = places
        self._open += 1
        return column, _End()

    def reducer_override(self, obj: Any) -> Any:
        """How to restore a tensor that is in no group."""
        if type(obj) is Tensor and obj.is_cuda:
            return reduce_tensor(obj.detach())  # the memory stays where it is
        if isinstance(obj, MemoryMappedTensor):  # its file may be gone by then
            return Tensor.detach, (obj.as_subclass(Tensor),)
        # torch's own pickling restores a view from the start of the storage, wherever it began.
        if type(obj) is Tensor and obj.is_nested and obj.layout == torch.strided:
            return nested_view, nested_parts(obj)
        return NotImplemented

    def _column(self, values: list[Any]) -> Column:
        classes = set(map(type, values))
        if len(classes) > 1:
            return self._mixed(values, map(type, values), self._column)
        for cls in classes:
            if cls is Tensor:
                return self._tensor_column(values) or ("plain", values)
            if _taken[cls]:
                return self._object_column(cls, values)
        return "plain", values

    def _mixed(
        self,
        values: list[Any],
        kinds: Any,
        column: Callable[[list[Any]], Column],
    ) -> Column:
        """A column for the values of each kind."""
        indices: dict[Hashable, list[int]] = {}
        for index, kind in enumerate(kinds):
            indices.setdefault(kind, []).append(index)
        columns = [column([values[i] for i in of_kind]) for of_kind in indices.values()]
        return "mixed", list(indices.values()), columns

    def _tensor_column(self, tensors: list[Tensor]) -> Column | None:
        """A column of tensors, or ``None`` if the pickle has to take some of them apart."""
        places = self._tensors.add(tensors)
        return None if places is None else ("tensors", places)

    def _object_column(self, cls: type, objects: list[Any]) -> Column:
        ids = list(map(id, objects))
        if len(set(ids)) < len(ids) or not self._places.keys().isdisjoint(ids):
            return self._repeated(cls, objects, ids)
        states: list[dict[str, Any]] = list(map(vars, objects))
        kinds = {
            kind: tuple(name for name in kind if name not in compat.CACHES)
            for kind in set(map(tuple, states))
        }
        if len(set(kinds.values())) > 1:
            of_each = (kinds[tuple(state)] for state in states)
            return self._mixed(objects, of_each, lambda v: self._object_column(cls, v))
        number, start = len(self._starts), self._count
        self._starts.append(start)
        self._count += len(ids)
        self._places.update(zip(ids, range(start, self._count), strict=True))
        self._alive.append(objects)
        names = next(iter(kinds.values()))
        fields = []
        for name in names:
            values = list(map(itemgetter(name), states))
            if name == compat.LOCKED and any(values):  # restored after everything else
                self._locked.append((number, [n for n, locked in enumerate(values) if locked]))
                values = [None] * len(values) if cls is not TensorDict else [False] * len(values)
            fields.append(self._field(name, values))
        return "objects", number, cls, len(objects), names, fields

    def _repeated(self, cls: type, objects: list[Any], ids: list[int]) -> Column:
        fresh = {n: obj for n, obj in zip(ids, objects, strict=True) if n not in self._places}
        column = self._object_column(cls, list(fresh.values())) if fresh else None
        places = [self._places[n] for n in ids]
        numbers = [bisect_right(self._starts, place) - 1 for place in places]
        found = zip(numbers, places, strict=True)
        return "again", column, [(n, place - self._starts[n]) for n, place in found]

    def _field(self, name: str, values: list[Any]) -> Column:
        """A column of the values that tensordicts or tensorclasses have as one attribute."""
        if name == compat.ROWS:
            return "lists", list(map(len, values)), self._column(list(chain.from_iterable(values)))
        if name == compat.ENTRIES and type(values[0]) is not dict:
            return self._column(values)
        if name == compat.ENTRIES:
            return self._dicts(values, self._column)
        if name == compat.FIELDS:
            return self._dicts(values, _plain)
        return _plain(values)

    def _dicts(self, dicts: list[dict[str, Any]], column: Callable[[list[Any]], Column]) -> Column:
        kinds = set(map(tuple, dicts))
        if len(kinds) > 1:
            return self._mixed(dicts, map(tuple, dicts), lambda v: self._dicts(v, column))
        (keys,) = kinds
        columns = [column(list(map(itemgetter(key), dicts))) for key in keys]
        return "dicts", len(dicts), keys, columns


def _plain(values: list[Any]) -> Column:
    first, classes = values[0], set(map(type, values))
    # Values of two classes may be equal, as 1 and True are, or not comparable, as arrays are not.
    if len(classes) == 1 and classes <= _CONSTANTS and values.count(first) == len(values):
        return "same", len(values), first
    return "plain", values


class ColumnUnpickler(pickle.Unpickler):
    """Reads what :class:`ColumnPickler` wrote.

    Args:
        file: what it wrote.
        tensors: the tensors, group by group.
    """

    def __init__(self, file: io.BytesIO, tensors: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(file)
        self._groups = tensors
        self._objects: dict[int, list[Any]] = {}

    def read(self) -> Any:
        """The value."""
        value, locked = self.load()
        for number, indices in locked:
            for index in indices:
                self._objects[number][index].lock_()
        return value

    def persistent_load(self, pid: tuple[Column, Any]) -> Any:
        """The object that was pickled as a column of one."""
        return self._read(pid[0])[0]

    def _read(self, column: Column) -> list[Any]:
        return getattr(self, column[0])(*column[1:])

    def plain(self, values: list[Any]) -> list[Any]:
        """Values that are in the pickle."""
        return values

    def same(self, count: int, value: Any) -> list[Any]:
        """One value for all."""
        return [value] * count

    def mixed(self, indices: list[list[int]], columns: list[Column]) -> list[Any]:
        """The values of several columns, each with the indices where its values belong."""
        found: dict[int, Any] = {}
        for of_kind, column in zip(indices, columns, strict=True):
            found.update(zip(of_kind, self._read(column), strict=True))
        return [found[index] for index in range(len(found))]

    def tensors(self, places: Places) -> list[Tensor]:
        """Tensors of the groups."""
        if isinstance(places, list):
            return [self._groups[group][index] for group, index in places]
        group, start, stop = places
        return list(self._groups[group][start:stop])

    def objects(
        self, number: int, cls: type, count: int, names: tuple[str, ...], fields: list[Column]
    ) -> list[Any]:
        """Tensordicts or tensorclasses of one class, with the same attributes."""
        new: Any = cls.__new__
        objects = self._objects[number] = [new(cls) for _ in range(count)]
        states: list[Any] = list(map(vars, objects))
        by_name = dict(zip(names, fields, strict=True))
        constants = {name: field[2] for name, field in by_name.items() if field[0] == "same"}
        for state in states:
            state.update(constants)
        for name in (name for name in names if name not in constants):
            for state, value in zip(states, self._read(by_name[name]), strict=True):
                state[name] = value
        return objects

    def again(self, column: Column | None, places: list[tuple[int, int]]) -> list[Any]:
        """Objects that are in another column, too, or twice in this one."""
        if column is not None:
            self._read(column)
        return [self._objects[number][index] for number, index in places]

    def lists(self, lengths: list[int], column: Column) -> list[list[Any]]:
        """Lists, from one column of all their elements."""
        values = iter(self._read(column))
        return [list(islice(values, length)) for length in lengths]

    def dicts(self, count: int, keys: tuple[str, ...], columns: list[Column]) -> list[Any]:
        """Dictionaries with the same keys, and a column for each."""
        if not keys:
            return [{} for _ in range(count)]
        rows = zip(*map(self._read, columns), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]
