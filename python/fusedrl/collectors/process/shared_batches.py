"""Passes batches to another process in shared memory, which it uses without a copy."""

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
SPARE = 4  # free segments that are kept


# A segment with a batch: its number and its bytes, those from which on it says what the batch is,
# and the numbers of the segments that are used no more.
Segment = tuple[int, int, int, list[int]]


class Segments:
    """Memory without a name in any file system, which a process writes batches into, again and
    again: memory that is new takes several times as long.
    """

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}
        self._free: list[int] = []  # in the order of their release
        self._numbers = itertools.count()

    def pack(self, batch: Any) -> tuple[Segment, int | None]:
        """Copy a batch's tensors, without their autograd graphs; CUDA tensors stay where they are.

        Returns:
            What the other process unpacks, and the descriptor of a segment that it does not know
            yet, which the caller closes.
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
        # Of several with the same size the one that was released last, which may be in caches.
        enough = [n for n in reversed(self._free) if len(self._memory[n]) >= nbytes]
        if enough:
            segment = min(enough, key=lambda n: len(self._memory[n]))
            self._free.remove(segment)
            return segment, None
        segment = next(self._numbers)
        descriptor = os.memfd_create("fusedrl-batch")
        # Larger than needed, as memory that is never written to costs nothing.
        self._memory[segment] = _mapped(descriptor, max(SMALLEST, 1 << (nbytes - 1).bit_length()))
        return segment, descriptor

    def release(self, segments: Iterable[int]) -> None:
        """Write again to the segments that :meth:`Mappings.released` returned."""
        self._free += segments


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """The memory of a file, which is made as long; it needs no descriptor from then on."""
    path = f"/proc/self/fd/{descriptor}"
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


class Mappings:
    """The batches in another process's :class:`Segments`.

    A segment becomes free once this process has no tensor in it and no view of one. A process that
    is forked from this one sees the same memory; keep a batch here while such a process reads it.
    """

    def __init__(self) -> None:
        self._mapped: dict[int, Tensor] = {}
        self._lent: dict[int, tuple[Any, int]] = {}  # weak references to memory, and its segments
        self._returned: deque[Any] = deque()

    def unpack(self, shared: Segment, descriptor: int | None) -> Any:
        """The batch, whose tensors lie in the segment and may be written to."""
        segment, nbytes, start, dropped = shared
        for number in dropped:
            del self._mapped[number]
        if descriptor is not None:
            try:
                self._mapped[segment] = _mapped(descriptor, nbytes)
            finally:
                os.close(descriptor)
        memory = self._mapped[segment].numpy()  # is freed with the last tensor over it
        # No Python code runs when it is freed, which Ctrl-C could interrupt.
        lent = weakref.ref(memory, self._returned.append)
        self._lent[id(lent)] = lent, segment
        return put_together(pickle.loads(memory[start:].data), memory)

    def released(self) -> list[int]:
        """The segments that became free since the last call."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        return [self._lent.pop(id(lent))[1] for lent in returned]
