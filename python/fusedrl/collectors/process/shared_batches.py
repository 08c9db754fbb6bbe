"""Batches that one process writes into shared memory and another one uses where they lie."""

from __future__ import annotations

import os
import resource
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.transport import Contents, put_together, take_apart

SMALLEST = 1 << 16
SPARE = 4  # free segments that keep their memory
DESCRIPTORS_ASIDE = 256  # for all else that a process opens


class SharedBatch(NamedTuple):
    """Where a batch lies, and what it is made of: small, for a pipe.

    The segment is ``index``; ``path`` opens its file, whose number is ``inode``, and ``nbytes`` is
    its size.
    """

    index: int
    path: str
    inode: int
    nbytes: int
    contents: Contents


class _Segment(NamedTuple):
    descriptor: int
    inode: int
    memory: Tensor


class Segments:
    """The memory that a process writes batches into; what is given back is used again.

    It has no name in any file system, so that nothing is left when the process is killed. Each
    segment is an open file of this process, whose limit is raised where they are many.

    Example:
        >>> segments, mappings = Segments(), Mappings()  # in two processes
        >>> batch = mappings.unpack(segments.pack(TensorDict(x=torch.ones(3))))
        >>> del batch
        >>> segments.release(mappings.released())
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._free: dict[int, bool] = {}  # has it pages; in the order they were given back

    def pack(self, batch: Any) -> SharedBatch:
        """Copy a batch's tensors into a segment, without their gradient graphs.

        CUDA tensors stay where they are, and are opened there by the other process.

        Args:
            batch: a tensordict, or anything that can be pickled.

        Raises:
            RuntimeError: this process may not open another file: the other one keeps too many
                batches.
        """
        contents, tensors = take_apart(batch, share=True)
        index = self._found(contents.nbytes)
        descriptor, inode, memory = self._segments[index]
        tensors.copy(contents.groups, memory)
        del self._free[index]
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return SharedBatch(index, path, inode, len(memory), contents)

    def _found(self, nbytes: int) -> int:
        """A free segment of so many bytes: the smallest that will do, or the largest, grown."""
        # Of one size, the one that was given back last: it still has its pages.
        sizes = {index: len(self._segments[index].memory) for index in reversed(self._free)}
        enough = [index for index in sizes if sizes[index] >= nbytes]
        if enough:
            return min(enough, key=sizes.__getitem__)
        try:
            if not sizes:
                self._segments.append(_new_segment())
                sizes = {len(self._segments) - 1: 0}
                self._free |= dict.fromkeys(sizes, False)
            index = max(sizes, key=sizes.__getitem__)
            # More than is needed: memory that nothing is written to costs nothing.
            size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
            segment = self._segments[index]
            os.ftruncate(segment.descriptor, size)
            memory = _mapped(segment.descriptor, size)
        except (OSError, RuntimeError) as error:
            raise RuntimeError(
                f"batch: expected memory for another one, got {error}; keep fewer batches (a "
                "tensor of one keeps all of it: clone what is kept), or raise the limit of open "
                "files"
            ) from error
        self._segments[index] = segment._replace(memory=memory)
        return index

    def release(self, indices: Iterable[int]) -> None:
        """Take segments back that :meth:`Mappings.released` named."""
        self._free.update(dict.fromkeys(indices, True))
        for index in [index for index, full in list(self._free.items())[:-SPARE] if full]:
            # Its pages go, its size stays: it reads as zeros until it is written again.
            descriptor, _, memory = self._segments[index]
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, len(memory))
            self._free[index] = False

    def close(self) -> None:
        """Let go of the memory; batches that were unpacked keep theirs."""
        for segment in self._segments:
            os.close(segment.descriptor)
        self._segments.clear()
        self._free.clear()


def _new_segment() -> _Segment:
    descriptor = os.memfd_create("fusedrl-batch")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and descriptor + DESCRIPTORS_ASIDE > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return _Segment(descriptor, os.fstat(descriptor).st_ino, torch.empty(0, dtype=torch.uint8))


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    # The tensor needs no open file: a process may keep more of them than it may open files.
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class _Lent(weakref.ref[Any]):
    """To the memory of a batch, which is that of segment ``index``."""

    __slots__ = ("index",)
    index: int


class Mappings:
    """Batches that :class:`Segments` were packed in, as another process sees them.

    They may be kept for as long as one likes: a segment is free once none of its tensors exists in
    this process, nor any view of one. A process forked from this one sees the same memory; keep a
    batch here while such a process reads it.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[_Lent] = deque()

    def unpack(self, shared: SharedBatch) -> Any:
        """The batch; its tensors are the segment's memory, and may be written to.

        Raises:
            RuntimeError: the process that packed it is gone, and this one never saw the segment.
        """
        mapped = self._mapped.get(shared.index)
        if mapped is None or len(mapped) != shared.nbytes:
            mapped = self._mapped[shared.index] = _opened(shared)
        buffer = mapped.numpy().data  # an object that ends with the last tensor over it
        # Nothing that is written in Python runs at its end, which Ctrl-C could break off.
        lent = _Lent(buffer, self._returned.append)
        lent.index = shared.index
        self._lent[id(lent)] = lent
        return put_together(shared.contents, torch.frombuffer(buffer, dtype=torch.uint8))

    def released(self) -> list[int]:
        """The segments that became free since the last call."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        return [self._lent.pop(id(lent)).index for lent in returned]

    def close(self) -> None:
        """Let go of the memory that no tensor needs."""
        self._mapped.clear()


def _opened(shared: SharedBatch) -> Tensor:
    found = "no such process"
    try:
        descriptor = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        found = str(error)
    else:
        try:
            # Another process may have the pid by now, and any file under the number.
            if os.fstat(descriptor).st_ino == shared.inode:
                return _mapped(descriptor, shared.nbytes)
        finally:
            os.close(descriptor)
    raise RuntimeError(
        f"batch: expected the process that packed it to run, as this user and seen by this "
        f"process, got {found} for {shared.path}; unpack batches while it lives"
    )
