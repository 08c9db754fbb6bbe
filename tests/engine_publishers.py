"""Trainers in processes of their own, whose channels an engine reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from channel_workers import process
from tiny_engines import expected, tiny_model, train

from fusedrl import WeightChannel


def publish_models(pipe: Any, seed: int, options: dict[str, Any]) -> None:
    """Send the handle; then train, publish, and tell the version and its greedy tokens."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), seed=seed)
    torch.manual_seed(seed)
    with WeightChannel.create(model, **options) as channel:
        pipe.send(channel.handle)
        while pipe.recv():
            train(model)
            pipe.send((channel.publish(), expected(model)))


class Publisher:
    """A trainer in another process.

    Attributes:
        handle: of its channel.
    """

    def __init__(self, child: Any, pipe: Any) -> None:
        self.pid: int = child.pid
        self._child = child
        self._pipe = pipe
        self.handle = pipe.recv()

    def publish(self) -> tuple[int, list[int]]:
        """A version, and its greedy tokens by transformers."""
        self._pipe.send(True)
        return self._pipe.recv()

    def kill(self) -> None:
        """As SIGKILL does, at once."""
        self._child.kill()
        self._child.join()


@contextmanager
def publisher(seed: int = 0, **options: Any) -> Iterator[Publisher]:
    """A trainer in another process, until the block ends."""
    with process(publish_models, seed, options) as (child, pipe):
        yield Publisher(child, pipe)
