"""Pass batches to another process in shared memory, without a copy in the receiver."""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fusedrl.transport import Packer, put_together

SMALLEST = 1 << 16
SPARE = 4  # free segments to keep for reuse


# A segment with a batch: its number, its size in bytes, the offset of the pickled metadata, and the
# numbers of segments that the sender has dropped.
Segment = tuple[int, int, int, list[int]]


class Segments:
    """Anonymous shared memory for batches, reused because writing to new memory is slow."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._free: list[int] = []  # in order of release
        self._numbers = itertools.count()

    def pack(self, batch: Any) -> tuple[Segment, int | None]:
        """Copy a batch's tensors, without their autograd graphs; CUDA tensors stay where they are.

        Returns:
            The segment, and the file descriptor of a new segment, which the caller must close.
        """
        packer = Packer(batch, share=True)
        contents = pickle.dumps(packer.contents)
        start = packer.contents.nbytes
        segment, descriptor = self._segment(start + len(contents))
        memory = self._memory[segment]
        packer.copy(memory)
        memory.numpy()[start : start + len(contents)] = np.frombuffer(contents, np.uint8)
        dropped, self._free = self._free[:-SPARE], self._free[-SPARE:]
        for number in dropped:
            del self._memory[number]
        return (segment, len(memory), start, dropped), descriptor

    def _segment(self, nbytes: int) -> tuple[int, int | None]:
        # Among equal sizes the segment released last, which may still be in a cache.
        enough = [n for n in reversed(self._free) if len(self._memory[n]) >= nbytes]
        if enough:
            segment = min(enough, key=lambda n: len(self._memory[n]))
            self._free.remove(segment)
            return segment, None
        segment = next(self._numbers)
        descriptor = os.memfd_create("fusedrl-batch")
        # Rounded up: pages that are never written are not allocated.
        self._memory[segment] = _mapped(descriptor, max(SMALLEST, 1 << (nbytes - 1).bit_length()))
        return segment, descriptor

    def release(self, segments: Iterable[int]) -> None:
        """Reuse the segments that :meth:`Mappings.released` returned."""
        self._free += segments


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """Resize a file and map it; the mapping does not need the descriptor."""
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class Mappings:
    """The batches in another process's :class:`Segments`.

    A segment becomes free when this process has no tensor or view in it. A fork of this process
    shares the memory: keep a batch here while a fork reads it.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}
        self._lent: dict[int, tuple[Any, int]] = {}  # weak reference to the memory, and its segment
        self._returned: deque[Any] = deque()

    def unpack(self, shared: Segment, descriptor: int | None) -> Any:
        """The batch, with writable tensors in the segment."""
        segment, nbytes, start, dropped = shared
        for number in dropped:
            del self._mapped[number]
        if descriptor is not None:
            try:
                self._mapped[segment] = _mapped(descriptor, nbytes)
            finally:
                os.close(descriptor)
        memory = self._mapped[segment].numpy()  # freed with its last tensor
        # The callback is a C function, which Ctrl-C cannot interrupt.
        lent = weakref.ref(memory, self._returned.append)
        self._lent[id(lent)] = lent, segment
        return put_together(pickle.loads(memory[start:].data), memory)

    def released(self) -> list[int]:
        """The segments that became free since the last call."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        return [self._lent.pop(id(lent))[1] for lent in returned]
