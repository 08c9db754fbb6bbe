"""What the processes run that the tests of shared batches start."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

from fusedrl.collectors.process.messages import post, receive
from fusedrl.collectors.process.shared_batches import Segments


def ragged(rows: int = 6, first: int = 0) -> LazyStackedTensorDict:
    """Rows of different lengths with text, whose values say which row they are."""
    return lazy_stack(
        [
            TensorDict(
                tokens=torch.arange(n + 1) + 100 * n,
                text=f"row {n}",
                next=TensorDict(done=torch.tensor([n % 2 == 0])),
            )
            for n in range(first, first + rows)
        ]
    )


def open_files() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def pack_on_request(end: socket.socket) -> None:
    """Pack ``ragged(*arguments)`` for each message, and say how many files are open."""
    segments = Segments()
    while got := receive(end)[0]:
        arguments, released = got
        segments.release(released)
        shared, descriptor = segments.pack(ragged(*arguments))
        post(end, shared, open_files() - (descriptor is not None), descriptor=descriptor)
        if descriptor is not None:
            os.close(descriptor)
