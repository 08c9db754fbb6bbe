"""Memory as a kernel may use it: inside tensors, aligned, written before read, without races."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from ptx.instructions import BITS, Array
from ptx.program import Variable

UNWRITTEN = 0xFE  # fills what nobody has written, as host.cpp does


class Fault(Exception):
    """What would be undefined, or an error, on a GPU."""


class Access(NamedTuple):
    """Who accesses memory, each with its block and the number of barriers that it has met.

    Users of a block have ``slots`` consecutive numbers: one for each thread, and the last for all
    atomic operations, which do not race with each other.
    """

    users: Array
    blocks: Array
    barriers: Array
    slots: int

    def of(self, some: Array) -> Access:
        return self._replace(
            users=self.users[some], blocks=self.blocks[some], barriers=self.barriers[some]
        )

    def atomic(self) -> Access:
        return self._replace(users=self.blocks * self.slots + self.slots - 1)


class Region:
    """Memory that is contiguous, and who has used each part of it: as large as what is accessed.

    Two users race if one writes what the other one uses, and no barrier of their block lies
    between; none orders blocks.
    """

    def __init__(self, begin: int, data: Array) -> None:
        self.begin, self.data = begin, data
        self.constant = False  # read through the cache that writes do not reach
        self._views: dict[int, Array] = {}
        self._users: tuple[Array, ...] | None = None
        self._part = 1  # bytes

    def elements(self, offsets: Array, count: int, size: int) -> tuple[Array, Array]:
        """The memory in elements of ``size`` bytes, and which of them lie at offsets in bytes."""
        if size not in self._views:
            self._views[size] = self.data[: len(self.data) // size * size].view(BITS[size])
        return self._views[size], offsets[:, None] // size + np.arange(count)

    def note(self, offsets: Array, count: int, size: int, by: Access, *, write: bool) -> None:
        """Each user's ``count`` elements of ``size`` bytes from its offset on."""
        if self._users is None:
            self._part = size
            nobody = np.full(-(-len(self.data) // size), -1, np.int32)
            self._users = tuple(nobody.copy() for _ in range(5))
        elif size < self._part:
            self._users = tuple(np.repeat(known, self._part // size) for known in self._users)
            self._part = size
        parts = count * size // self._part
        # Of those that read since the barrier ``read``, the first and the last tell enough.
        writer, written, first, last, read = self._users
        at = (offsets[:, None] // self._part + np.arange(parts)).ravel()
        me, now = np.repeat(by.users, parts), np.repeat(by.barriers, parts)

        def own_block(user: Array) -> Array:
            return user[at] // by.slots == me // by.slots

        def races(user: Array, since: Array) -> Array:
            beside = ~own_block(user) | (since[at] == now)
            return (user[at] >= 0) & (user[at] != me) & beside

        found = races(writer, written)
        if write:
            found |= races(first, read) | races(last, read)
            writer[at], written[at] = me, now
            found |= writer[at] != me  # two users of this very instruction
        else:
            over = (first[at] < 0) | (own_block(first) & own_block(last) & (read[at] < now))
            lowest = np.where(over, me, np.minimum(first[at], me))
            first[at[::-1]] = lowest[::-1]  # of several assignments the last one stays
            last[at] = np.where(over, me, np.maximum(last[at], me))
            read[at] = now
        if found.any():
            raise Fault(f"a race, of thread {me[found][0] % by.slots} and another one")

    def is_written(self) -> bool:
        return self._users is not None and bool((self._users[0] >= 0).any())


class Memory:
    """The spaces of one launch: of tensors, of every block's shared variables, and of arguments."""

    def __init__(
        self,
        find: Callable[[int], tuple[int, int]],
        shared: dict[str, Variable],
        blocks: int,
        arguments: bytes,
    ) -> None:
        self._find = find
        self._tensors: list[Region] = []
        self._arguments = Region(0, np.frombuffer(arguments, np.uint8))
        variables = sorted(shared.values()) or [Variable(0, 0)]
        self._starts = np.array([v.offset for v in variables])
        self._ends = np.array([v.offset + v.size for v in variables])
        self._stride = (int(self._ends[-1]) + 15) // 16 * 16  # from block to block
        self._shared = Region(0, np.full(blocks * self._stride, UNWRITTEN, np.uint8))

    def load(
        self, space: str, address: Array, count: int, size: int, by: Access, *, cached: bool
    ) -> Array:
        """``count`` elements of ``size`` bytes for each lane, as bits."""
        result = np.empty((len(address), count), BITS[size])
        for region, who, offsets in self._parts(space, address, count * size, by):
            memory, at = region.elements(offsets, count, size)
            result[who] = memory[at]
            if space == "param":
                continue
            if (result[who] == int.from_bytes(bytes([UNWRITTEN] * size), "little")).any():
                raise Fault("a read of what nobody has written")
            if cached and region.is_written():
                raise Fault("a read past what the kernel has written")
            region.constant |= cached
            if not region.constant:
                region.note(offsets, count, size, by.of(who), write=False)
        return result

    def store(self, space: str, address: Array, values: Array, by: Access) -> None:
        """The reverse; ``values`` has a row for each lane."""
        count, size = values.shape[1], values.dtype.itemsize
        for region, who, offsets in self._parts(space, address, count * size, by):
            if region.constant:
                raise Fault("a write to what the kernel takes for constant")
            region.note(offsets, count, size, by.of(who), write=True)
            memory, at = region.elements(offsets, count, size)
            memory[at] = values[who]

    def swap(
        self, space: str, address: Array, values: Array, function: np.ufunc, by: Access
    ) -> Array:
        """The atomic operations of several lanes, one after the other; what each found there."""
        size, found = values.dtype.itemsize, np.empty_like(values)
        for region, who, offsets in self._parts(space, address, size, by):
            region.note(offsets, 1, size, by.of(who).atomic(), write=True)
            memory, at = region.elements(offsets, 1, size)
            for lane, place in zip(who, at[:, 0], strict=True):
                found[lane] = memory[place]
                memory[place] = function(memory[place], values[lane])
        return found

    def _parts(
        self, space: str, address: Array, size: int, by: Access
    ) -> Iterator[tuple[Region, Array, Array]]:
        """Each region, which of the lanes access it, and at which offsets."""
        if (address % np.uint64(size)).any():
            raise Fault(f"an access of {size} bytes at no multiple of them")
        everyone = np.arange(len(address))
        if space == "param":
            if (address + np.uint64(size) > len(self._arguments.data)).any():
                raise Fault("an access beyond the arguments")
            yield self._arguments, everyone, address.astype(np.int64)
        elif space == "shared":
            offset = address.astype(np.int64)
            which = np.maximum(np.searchsorted(self._starts, offset, side="right") - 1, 0)
            if ((offset < 0) | (offset + size > self._ends[which])).any():
                raise Fault("an access beyond a shared variable")
            yield self._shared, everyone, offset + by.blocks * self._stride
        else:
            yield from self._of_tensors(address, size, everyone)

    def _of_tensors(
        self, address: Array, size: int, left: Array
    ) -> Iterator[tuple[Region, Array, Array]]:
        while len(left):
            region = self._tensor(int(address[left[0]]))
            offset = address[left] - np.uint64(region.begin)  # wraps around below it
            inside = offset < len(region.data)
            if (offset[inside] + np.uint64(size) > len(region.data)).any():
                raise Fault("an access beyond the end of a tensor")
            yield region, left[inside], offset[inside].astype(np.int64)
            left = left[~inside]

    def _tensor(self, address: int) -> Region:
        for region in self._tensors:
            if region.begin <= address < region.begin + len(region.data):
                return region
        begin, size = self._find(address)
        if size == 0:
            raise Fault(f"an access to what is no tensor, at {address:#x}")
        data = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(begin))
        self._tensors.append(Region(begin, data))
        return self._tensors[-1]
