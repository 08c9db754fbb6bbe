"""Collective steps of the ranks of a sharded model: each has one outcome, the same on all."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedrl.channel.tensors import Weight, is_dtensor
from fusedrl.compat.torch import store_of_ranks

PAUSE_S = 0.002  # between two polls of the store
_STARTED = "started"  # a rank's entry in a round until it has passed a value


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Defer Ctrl-C on the main thread until the block has ended."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[Any] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])


def ranks_of(weights: Iterable[Weight]) -> tuple[int, ...]:
    """The global ranks over which any of the weights is sharded; none for whole tensors."""
    sharded: list[Any] = [weight.tensor for weight in weights if is_dtensor(weight.tensor)]
    meshes = [tensor.device_mesh.mesh for tensor in sharded]
    return tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))


class Ranks:
    """Ranks that take steps collectively, in rounds over their group's store; or a single process.

    Each round has one outcome, also for ranks that come late: the values of all ranks, or the error
    of one. So the ranks stay in step.

    ``ranks`` are global ranks, empty for whole tensors. ``round`` is the number of the next round,
    the same on all ranks.
    """

    _instances: ClassVar[dict[tuple[int, ...], Ranks]] = {}

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.round = 0
        self.is_first = not ranks or dist.get_rank() == ranks[0]
        if len(ranks) > 1:
            self.base = store_of_ranks()
            self._store = distributed_c10d.PrefixStore(f"fusedrl {list(ranks)}", self.base)
            self._rank = dist.get_rank()
            self._lock = threading.Lock()

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Ranks:
        """The instance for these ranks; one for all channels, so that all steps have one order."""
        instance = cls._instances.get(ranks)
        if instance is None or (len(ranks) > 1 and instance.base is not store_of_ranks()):
            instance = cls._instances[ranks] = cls(ranks)
        return instance

    @contextmanager
    def step(self) -> Iterator[Ranks]:
        """A block that all ranks run; an error on one rank is raised on every rank.

        Ctrl-C takes effect after the block, which ends in bounded time.
        """
        if len(self.ranks) < 2:
            yield self
            return
        with interrupted_later(), self._lock:
            try:
                self._store.set(f"{self.round} of {self._rank}", _STARTED)
                yield self
            except BaseException as error:
                kind = "TimeoutError" if isinstance(error, TimeoutError) else "RuntimeError"
                text = (
                    f"ranks: expected every rank to succeed, got on rank {self._rank}: "
                    f"{type(error).__name__}: {error}; nothing is published: fix this, and call "
                    "again on every rank"
                )
                while not self._settle(text, kind):  # a round that succeeded keeps its outcome
                    self.round += 1
                self.round += 1
                raise

    def gather(self, call: str, value: Any, timeout: float, extra: float = 0.0) -> list[Any]:
        """Wait until every rank makes the same call; returns all values, of JSON types.

        It waits ``timeout`` seconds, and ``extra`` seconds more for ranks that are in the block.
        """
        if len(self.ranks) < 2:
            return [value]
        key = str(self.round)
        keys = {rank: f"{key} of {rank}" for rank in self.ranks}
        self._store.set(keys[self._rank], json.dumps([call, value]))
        if self._store.add(f"{key} arrived", 1) == len(self.ranks):
            self._settle([json.loads(self._store.get(each)) for each in keys.values()])
            last = str(self.round - 1)  # no rank reads it any more
            for old in (last, f"{last} arrived", *(f"{last} of {rank}" for rank in self.ranks)):
                self._store.delete_key(old)
        began = time.monotonic()
        while not self._store.check([key]):
            if (waited := time.monotonic() - began) > timeout:
                absent = (None, _STARTED) if (is_over := waited > timeout + extra) else (None,)
                late = [str(rank) for rank in self.ranks if self._entry(rank) in absent]
                if late or is_over:
                    self._settle(
                        f"ranks: expected all of {list(self.ranks)} to make this call within "
                        f"{timeout} s, got none from rank {', '.join(late)}; make it on every "
                        "rank, or raise rank_timeout",
                        "TimeoutError",
                    )
            time.sleep(PAUSE_S)
        error, value = json.loads(self._store.get(key))
        if error is not None:
            raise (TimeoutError if error == "TimeoutError" else RuntimeError)(value)
        self.round += 1
        calls, values = zip(*value, strict=True)
        if len(set(calls)) > 1:
            made = ", ".join(f"rank {r}: {c}" for r, c in zip(self.ranks, calls, strict=True))
            raise ValueError(
                f"ranks: expected the same call on all ranks, got {made}; make it on every rank, "
                "in the same order, for the same model"
            )
        return list(values)

    def outcome(self, call: str, timeout: float) -> None:
        """Wait until every rank has done its part of a call; fails as :meth:`gather` does."""
        self.gather(f"end of {call}", None, timeout)

    def _entry(self, rank: int) -> str | None:
        key = f"{self.round} of {rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _settle(self, value: Any, error: str | None = None) -> bool:
        """Set the outcome of the round if it has none; returns whether the outcome is an error."""
        outcome = json.dumps([error, value])
        return json.loads(self._store.compare_set(str(self.round), "", outcome))[0] is not None
