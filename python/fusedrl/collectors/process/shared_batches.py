"""Passes batches to another process in shared memory, which it uses without a copy."""

from __future__ import annotations

import os
import resource
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.transport import Contents, Packer, put_together

SMALLEST = 1 << 16
SPARE = 4  # free segments that keep their memory
DESCRIPTORS_ASIDE = 256  # descriptors that are left for everything else that a process opens


class SharedBatch(NamedTuple):
    """The description of a batch in shared memory, small enough for a pipe.

    It lies in the segment ``index``. ``path`` opens the segment's file, whose inode is ``inode``,
    and ``nbytes`` is the size of the segment.
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
    """The segments of memory that a process writes batches into, which are reused once released.

    They have no name in any file system, so that nothing is left when the process is killed. Each
    segment is an open file of this process, and the limit of open files is raised if necessary.

    Example:
        >>> segments, mappings = Segments(), Mappings()  # in two processes
        >>> batch = mappings.unpack(segments.pack(TensorDict(x=torch.ones(3))))
        >>> del batch
        >>> segments.release(mappings.released())
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        # Free segments in the order of their release, each with whether it still has its pages.
        self._free: dict[int, bool] = {}

    def pack(self, batch: Any) -> SharedBatch:
        """Copy a batch's tensors into a segment, without their autograd graphs.

        CUDA tensors stay where they are, and the other process opens them there.

        Args:
            batch: a tensordict, or anything that can be pickled.

        Raises:
            RuntimeError: this process has reached its limit of open files, because the other
                process keeps too many batches.
        """
        packer = Packer(batch, share=True)
        index = self._free_segment(packer.contents.nbytes)
        descriptor, inode, memory = self._segments[index]
        packer.copy(memory)
        del self._free[index]
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return SharedBatch(index, path, inode, len(memory), packer.contents)

    def _free_segment(self, nbytes: int) -> int:
        """A free segment for ``nbytes``: the smallest that suffices, or the largest, enlarged."""
        # Of several with the same size, the one that was released last, as it still has its pages.
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
            # Larger than needed, as memory that is never written to costs nothing.
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
        """Mark the segments that :meth:`Mappings.released` returned as free."""
        self._free.update(dict.fromkeys(indices, True))
        for index in [index for index, full in list(self._free.items())[:-SPARE] if full]:
            # This frees the pages and keeps the size: it reads as zeros until it is written again.
            descriptor, _, memory = self._segments[index]
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, len(memory))
            self._free[index] = False

    def close(self) -> None:
        """Free the memory; batches that were unpacked keep theirs."""
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
    # A mapping needs no open file, so a process may keep more batches than it may open files.
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class _Lent(weakref.ref[Any]):
    """A weak reference to the memory of a batch, which lies in segment ``index``."""

    __slots__ = ("index",)
    index: int


class Mappings:
    """The batches in another process's :class:`Segments`, mapped into this one.

    You may keep them for as long as you like: a segment becomes free once this process has none of
    its tensors and no view of them. A process forked from this one sees the same memory; keep a
    batch here while such a process reads it.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[_Lent] = deque()

    def unpack(self, shared: SharedBatch) -> Any:
        """The batch, whose tensors lie in the segment's memory and may be written to.

        Raises:
            RuntimeError: the process that packed it has ended, and this one has not mapped the
                segment before.
        """
        mapped = self._mapped.get(shared.index)
        if mapped is None or len(mapped) != shared.nbytes:
            mapped = self._mapped[shared.index] = _opened(shared)
        memory = mapped.numpy()  # an array that is freed with the last tensor over it
        # No Python code runs when it is freed, which Ctrl-C could interrupt.
        lent = _Lent(memory, self._returned.append)
        lent.index = shared.index
        self._lent[id(lent)] = lent
        return put_together(shared.contents, memory)

    def released(self) -> list[int]:
        """The indices of the segments that became free since the last call."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        return [self._lent.pop(id(lent)).index for lent in returned]

    def close(self) -> None:
        """Unmap the memory that no tensor uses."""
        self._mapped.clear()


def _opened(shared: SharedBatch) -> Tensor:
    failure = "no such process"
    try:
        descriptor = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        failure = str(error)
    else:
        try:
            # Another process may have the pid by now, and another file may have the descriptor.
            if os.fstat(descriptor).st_ino == shared.inode:
                return _mapped(descriptor, shared.nbytes)
        finally:
            os.close(descriptor)
    raise RuntimeError(
        f"batch: expected the process that packed it to run, as this user and seen by this "
        f"process, got {failure} for {shared.path}; unpack batches while it lives"
    )
