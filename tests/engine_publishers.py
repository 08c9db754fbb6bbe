"""Trainers in processes of their own, whose channels an engine reads."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from channel_workers import process
from tiny_engines import expected, tiny_model, train

from fusedrl import WeightChannel
from fusedrl.vllm import EngineWeights


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


# Of a trainer that updates a server all the time, in turn.
_STATES = 4


def update_always(pipe: Any, address: str, seed: int) -> None:
    """Tell the greedy tokens of some states; then update a server with them, one after another."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder), seed=seed)
    torch.manual_seed(seed)
    states, tokens = [], []
    for _ in range(_STATES):
        train(model)
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        tokens.append(expected(model))
    with WeightChannel.create(model) as channel:
        weights = EngineWeights(channel, address)
        weights.update(states[0], version=_STATES)
        pipe.send(tokens)
        while True:
            weights.update(states[(channel.version + 1) % _STATES])


class Updater:
    """A trainer in another process that updates a server all the time."""

    def __init__(self, child: Any, pipe: Any) -> None:
        self._child = child
        self._tokens = pipe.recv()

    def expected(self, version: int) -> list[int]:
        """The greedy tokens of a version, by transformers."""
        return self._tokens[version % _STATES]

    def kill_after(self, seconds: float) -> None:
        """As SIGKILL does, at some moment of an update."""
        time.sleep(seconds)
        self._child.kill()
        self._child.join()


@contextmanager
def updater(address: str, seed: int) -> Iterator[Updater]:
    """A trainer in another process, until the block ends."""
    with process(update_always, address, seed) as (child, pipe):
        yield Updater(child, pipe)
