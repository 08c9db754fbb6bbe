"""Batches that one process writes into shared memory and another one uses where they lie."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.parcel import Contents, put_together, take_apart


class Shipment(NamedTuple):
    """Where a batch lies, and what it is made of: small, for a pipe.

    The segment is ``index``; ``path`` opens its memory of ``nbytes``.
    """

    index: int
    path: str
    nbytes: int
    contents: Contents


class _Segment(NamedTuple):
    descriptor: int
    memory: Tensor


class Segments:
    """The memory that a process writes batches into; what is given back is used again.

    It has no name in any file system, so that nothing is left when the process is killed.
    """

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._free: set[int] = set()

    def pack(self, batch: Any) -> Shipment:
        """Copy a batch's tensors into a segment, without their gradient graphs."""
        contents, tensors = take_apart(batch, share=True)
        index = self._take(contents.nbytes)
        descriptor, memory = self._segments[index]
        tensors.copy(contents.groups, memory)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return Shipment(index, path, len(memory), contents)

    def _take(self, nbytes: int) -> int:
        """A segment of at least so many bytes: the smallest that will do, or the largest, grown."""
        sizes = {index: len(self._segments[index].memory) for index in self._free}
        enough = [index for index in sizes if sizes[index] >= nbytes]
        if enough:
            index = min(enough, key=sizes.__getitem__)
        elif sizes:
            index = max(sizes, key=sizes.__getitem__)
            descriptor = self._segments[index].descriptor
            self._segments[index] = _Segment(descriptor, _grown(descriptor, nbytes))
        else:
            index = len(self._segments)
            descriptor = os.memfd_create("fusedrl-batch")
            self._segments.append(_Segment(descriptor, _grown(descriptor, nbytes)))
        self._free.discard(index)
        return index

    def release(self, indices: Iterable[int]) -> None:
        """Take segments back that :meth:`Mappings.released` named."""
        self._free.update(indices)

    def close(self) -> None:
        """Let go of the memory; batches that were unpacked keep theirs."""
        for descriptor, _ in self._segments:
            os.close(descriptor)
        self._segments.clear()
        self._free.clear()


def _grown(descriptor: int, nbytes: int) -> Tensor:
    os.ftruncate(descriptor, nbytes)
    return _mapped(f"/proc/self/fd/{descriptor}", nbytes)


def _mapped(path: str, nbytes: int) -> Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class Mappings:
    """Batches as another process sees them that :class:`Segments` were packed in.

    They may be kept for as long as one likes: a segment is free once none of its tensors exists,
    nor any view of one, in this process.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}
        self._released: deque[int] = deque()

    def unpack(self, shipment: Shipment) -> Any:
        """The batch; its tensors are the segment's memory, and may be written to.

        Raises:
            RuntimeError: the process that packed it is gone, and this one never saw the segment.
        """
        index, path, nbytes, contents = shipment
        mapped = self._mapped.get(index)
        if mapped is None or len(mapped) != nbytes:
            try:
                mapped = self._mapped[index] = _mapped(path, nbytes)
            except (RuntimeError, OSError) as error:
                raise RuntimeError(
                    f"shipment: expected a running process that packed it, got {error}"
                ) from error
        buffer = mapped.numpy().data  # an object that ends with its last tensor
        weakref.finalize(buffer, self._released.append, index).atexit = False
        return put_together(contents, torch.frombuffer(buffer, dtype=torch.uint8))

    def released(self) -> list[int]:
        """The segments that became free since the last call."""
        return [self._released.popleft() for _ in range(len(self._released))]

    def close(self) -> None:
        """Let go of the memory that no tensor needs."""
        self._mapped.clear()
