"""Ranks that publish a sharded model together: each step has one outcome, the same on all ranks."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedrl.channel.checks import MAX_VERSION, count
from fusedrl.channel.tensors import Weight, is_dtensor
from fusedrl.compat.torch import store_of_ranks

PAUSE_S = 0.002  # between two looks at the store


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Let Ctrl-C take effect after the block, in which other ranks wait for this one."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[Callable[[], Any]] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(partial(handler, *args)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            held[0]()


class Rendezvous:
    """Rounds in which some ranks learn each other's states, through the store of their group.

    If a rank does not come to a round, or has an error before it, all others have an error, also
    those that come later. As each round has one outcome, ranks stay in step.

    Args:
        name: tells it from others of the same ranks.
        ranks: the global ranks that take part, this one among them.

    Attributes:
        round: the number of the next one, equal on all ranks.
        version: that the ranks published last; ``None`` before the first.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.round = 0
        self.version: int | None = None
        self.base = store_of_ranks()
        self._store = distributed_c10d.PrefixStore(f"fusedrl {name}", self.base)
        self._rank = dist.get_rank()
        self._calls = threading.Lock()

    def agree(self, patience: float, call: str, state: Any = None) -> dict[int, Any]:
        """Wait until every rank has come, and return the states of all, the same on every rank.

        Call it within :meth:`collective`: what follows from the states is then one error on all.

        Args:
            patience: seconds.
            call: what the ranks are doing, which must be the same.
            state: of this rank, as JSON has it.

        Raises:
            TimeoutError: ranks did not come in time, or another rank had such an error; the message
                names them.
            RuntimeError: another rank had another error, which the message has.
            ValueError: another rank makes another call.
        """
        key = str(self.round)
        self._store.set(f"rank {self._rank}", json.dumps([self.round, call, state]))
        if self._store.add(f"{key} came", 1) == len(self.ranks):
            self._settle(None, [json.loads(self._store.get(f"rank {r}"))[1:] for r in self.ranks])
            for old in (str(self.round - 1), f"{self.round - 1} came"):
                self._store.delete_key(old)
        deadline = time.monotonic() + patience
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                self._settle("TimeoutError", self._late(patience))
            time.sleep(PAUSE_S)
        error, value = json.loads(self._store.get(key))
        if error is not None:
            raise (TimeoutError if error == "TimeoutError" else RuntimeError)(value)
        self.round += 1
        calls, states = zip(*value, strict=True)
        called = dict(zip(self.ranks, calls, strict=True))
        _refuse_others("ranks: expected the same call", called, "make it on every rank")
        return dict(zip(self.ranks, states, strict=True))

    @contextmanager
    def collective(self) -> Iterator[None]:
        """A block that all ranks run; an error of one rank in it is one on every rank."""
        with self._calls:
            try:
                yield
            except BaseException as error:
                self._fail(error)
                raise

    def _fail(self, error: BaseException) -> None:
        """Make an error the outcome of the first round without a value, and leave it."""
        kind, text = "TimeoutError", f"{error} (on rank {self._rank})"
        if not isinstance(error, TimeoutError):
            kind, text = (
                "RuntimeError",
                f"ranks: expected all of them to take part, got rank {self._rank}: "
                f"{type(error).__name__}: {error}; nothing is published: call again on every rank "
                "once that is repaired",
            )
        while self._settle(kind, text)[0] is None:
            self.round += 1
        self.round += 1

    def _settle(self, error: str | None, value: Any) -> tuple[str | None, Any]:
        """The outcome of the round, a kind of error or none and a value: these if it has none."""
        return json.loads(self._store.compare_set(str(self.round), "", json.dumps([error, value])))

    def _late(self, patience: float) -> str:
        def came(name: str) -> bool:
            return self._store.check([name]) and json.loads(self._store.get(name))[0] == self.round

        late = [str(rank) for rank in self.ranks if not came(f"rank {rank}")]
        return (
            f"ranks: expected all of {list(self.ranks)} to make this call within {patience} s, got "
            f"none by rank {', '.join(late)}; make it on every rank, or raise rank_timeout"
        )


_RENDEZVOUS: dict[tuple[int, ...], Rendezvous] = {}


def rendezvous_of(ranks: tuple[int, ...]) -> Rendezvous:
    """The rendezvous of some ranks that is no channel's."""
    known = _RENDEZVOUS.get(ranks)
    if known is None or known.base is not store_of_ranks():  # of a group that has ended
        known = _RENDEZVOUS[ranks] = Rendezvous(f"of {list(ranks)}", ranks)
    return known


def publish_together(
    channel: Any,
    rendezvous: Rendezvous,
    version: int | None,
    timeout: float | None,
    find: Callable[[], dict[str, Weight]],
) -> int:
    """Publish one version on all ranks that have slots, or none on any.

    Args:
        channel: of this rank.
        rendezvous: of all ranks, each of which calls this.
        version: its number, read on the first rank that has slots; one more if ``None``.
        timeout: seconds that a rank waits for a free slot; the channel's own if ``None``.
        find: finds the places of the weights.

    Returns:
        The version. Ctrl-C takes effect after the call, which ends in bounded time.

    Raises:
        Exception: as :meth:`Rendezvous.agree`, or what this rank cannot do, which is told to all.
    """
    patience, holds = channel.rank_timeout, channel.holds
    with interrupted_later(), rendezvous.collective():
        limit = channel.limit(timeout)
        if version is not None:
            count("version", version, 0, MAX_VERSION)
        last = -1 if channel.version is None else channel.version
        state = [channel.layout.hash, holds, last, version]
        version = _next_version(rendezvous.agree(patience, "publish", state))
        places = find()
        with channel.writing(version, timeout=limit) if holds else nullcontext() as writing:
            shards = sum(is_dtensor(weight.tensor) for weight in places.values())
            shards = rendezvous.agree(patience + limit, "gather", shards)
            expected = "weights: expected the same number of sharded tensors"
            _refuse_others(expected, shards, "publish the same model on every rank")
            channel.layout.write(places, writing and writing.views)
            rendezvous.agree(patience + limit, "end")
        rendezvous.version = version
        return version


def ranks_of_shards(weights: Iterable[Weight]) -> tuple[int, ...]:
    """The ranks that share any of the tensors, and have to gather them; none for whole tensors."""
    sharded: list[Any] = [w.tensor for w in weights if is_dtensor(w.tensor)]
    meshes = [tensor.device_mesh.mesh for tensor in sharded]
    return tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))


def check_ends(states: dict[int, Any]) -> None:
    """Raise ``ValueError`` unless all channels have one layout, and one of the ranks has slots."""
    layouts = {rank: layout[:12] for rank, (layout, *_) in states.items()}
    remedy = "create all channels with the same names, shapes and dtypes"
    _refuse_others("channel: expected one layout", layouts, remedy)
    if not any(holds for _, holds, *_ in states.values()):
        raise ValueError(
            f"holds: expected True on one of the ranks {list(states)}, got False on all; leave it "
            "out for the first of them"
        )


def _refuse_others(expected: str, states: dict[int, Any], remedy: str) -> None:
    if len(set(states.values())) > 1:
        named = ", ".join(f"rank {rank}: {state}" for rank, state in states.items())
        raise ValueError(f"{expected} on all ranks, got {named}; {remedy}")


def _next_version(states: dict[int, Any]) -> int:
    check_ends(states)
    last = max(last for _, _, last, _ in states.values())
    wanted = next(wanted for _, holds, _, wanted in states.values() if holds)
    if wanted is None:
        return max(last, 0) + 1
    if wanted <= last:
        raise ValueError(
            f"version: expected more than the {last} that is published, got {wanted}; versions "
            "only grow: leave it out for the next one"
        )
    return wanted
