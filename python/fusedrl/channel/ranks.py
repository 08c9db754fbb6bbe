"""Ranks that publish a sharded model together: each step has one outcome, the same on all ranks."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

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


def ranks_of(weights: Iterable[Weight]) -> tuple[int, ...]:
    """The ranks that share any of the tensors, and have to gather them; none for whole tensors."""
    sharded: list[Any] = [weight.tensor for weight in weights if is_dtensor(weight.tensor)]
    meshes = [tensor.device_mesh.mesh for tensor in sharded]
    return tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))


class Ranks:
    """Ranks that take steps together, in rounds over the store of their group; one rank alone.

    Each round has one outcome, and ranks take it in any case: what every rank has brought, or the
    error of one. So they stay in step, also with ranks that come later.

    Args:
        ranks: the global ranks, this one among them; none, or one, where nobody else takes part.

    Attributes:
        round: the number of the next round, equal on all ranks.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.round = 0
        if len(ranks) > 1:
            self.base = store_of_ranks()
            self._store = distributed_c10d.PrefixStore(f"fusedrl {list(ranks)}", self.base)
            self._rank = dist.get_rank()
            self._calls = threading.Lock()

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Ranks:
        """Those of this process's group, the same for all channels: it has one order of steps."""
        known = _KNOWN.get(ranks)
        if known is None or (len(ranks) > 1 and known.base is not store_of_ranks()):
            known = _KNOWN[ranks] = cls(ranks)
        return known

    @contextmanager
    def together(self) -> Iterator[Ranks]:
        """A block that all ranks run; an error of one rank in it is one on every rank.

        Ctrl-C takes effect after the block, which ends in bounded time.
        """
        if len(self.ranks) < 2:
            yield self
            return
        with interrupted_later(), self._calls:
            try:
                yield self
            except BaseException as error:
                self._fail(error)
                raise

    def gather(self, call: str, value: Any, patience: float) -> list[Any]:
        """Wait until every rank has come, and return the values of all, the same on every rank.

        Args:
            call: what the ranks are doing, which must be the same.
            value: of this rank, as JSON has it.
            patience: seconds.

        Raises:
            TimeoutError: ranks did not come in time, or another rank had such an error; the message
                names them.
            RuntimeError: another rank had another error, which the message has.
            ValueError: another rank makes another call.
        """
        if len(self.ranks) < 2:
            return [value]
        outcome, mine = str(self.round), f"{self.round} of {self._rank}"
        brought = [f"{self.round} of {rank}" for rank in self.ranks]
        self._store.set(mine, json.dumps([call, value]))
        deadline = time.monotonic() + patience
        while not self._store.check([outcome]):
            if self._store.check(brought):
                self._settle(None, [json.loads(self._store.get(key)) for key in brought])
            elif time.monotonic() > deadline:
                came = map(self._store.check, ([key] for key in brought))
                late = [str(rank) for rank, has in zip(self.ranks, came, strict=True) if not has]
                self._settle(
                    "TimeoutError",
                    f"ranks: expected all of {list(self.ranks)} to make this call within "
                    f"{patience} s, got none by rank {', '.join(late)}; make it on every rank, or "
                    "raise rank_timeout",
                )
            else:
                time.sleep(PAUSE_S)
        error, value = json.loads(self._store.get(outcome))
        if error is not None:
            raise (TimeoutError if error == "TimeoutError" else RuntimeError)(value)
        for old in (f"{self.round - 1}", f"{self.round - 1} of {self._rank}"):
            self._store.delete_key(old)  # as all ranks have come to this round
        self.round += 1
        calls, values = zip(*value, strict=True)
        if len(set(calls)) > 1:
            made = ", ".join(f"rank {r}: {c}" for r, c in zip(self.ranks, calls, strict=True))
            raise ValueError(
                f"ranks: expected the same call on all ranks, got {made}; make it on every rank, "
                "in the same order, for the same model"
            )
        return list(values)

    def outcome(self, call: str, patience: float) -> None:
        """Wait until every rank has done its part of the call.

        Raises:
            Exception: as :meth:`gather`.
        """
        self.gather(f"end of {call}", None, patience)

    def _fail(self, error: BaseException) -> None:
        """Make an error the outcome of the first round without one; it stays that of its round."""
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


_KNOWN: dict[tuple[int, ...], Ranks] = {}
