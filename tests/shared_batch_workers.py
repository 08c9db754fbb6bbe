"""What the processes run that the tests of shared batches start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack

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


def pack_on_request(connection: Any) -> None:
    """Pack ``ragged(*arguments)`` for each message, and say how many files are open."""
    segments = Segments()
    while (got := connection.recv()) is not None:
        arguments, released = got
        segments.release(released)
        connection.send((segments.pack(ragged(*arguments)), open_files()))
    segments.close()
