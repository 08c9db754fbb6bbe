"""Ranks that publish a sharded model together: each step has one outcome, the same on all ranks."""

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

PAUSE_S = 0.002  # between two looks at the store
_CAME = "came"  # what a rank says in a round until it has brought something


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Let Ctrl-C on the main thread take effect after the block, which is done as a whole."""
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
    """The ranks that share any of the tensors, and have to gather them; none for whole tensors."""
    sharded: list[Any] = [weight.tensor for weight in weights if is_dtensor(weight.tensor)]
    meshes = [tensor.device_mesh.mesh for tensor in sharded]
    return tuple(sorted({rank for mesh in meshes for rank in mesh.flatten().tolist()}))


class Ranks:
    """Ranks that take steps together, in rounds over the store of their group; or one, alone.

    Each round has one outcome, which is taken by ranks that come late as well: what every rank has
    brought, or the error of one. So they stay in step.

    ``ranks`` are global ones; there are none where tensors are whole. ``round`` is the number of
    the next round, the same on all.
    """

    _known: ClassVar[dict[tuple[int, ...], Ranks]] = {}

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.round = 0
        self.is_first = not ranks or dist.get_rank() == ranks[0]
        if len(ranks) > 1:
            self.base = store_of_ranks()
            self._store = distributed_c10d.PrefixStore(f"fusedrl {list(ranks)}", self.base)
            self._rank = dist.get_rank()
            self._calls = threading.Lock()

    @classmethod
    def of(cls, ranks: tuple[int, ...]) -> Ranks:
        """Those of this process's group, which take the steps of all channels in one order."""
        known = cls._known.get(ranks)
        if known is None or (len(ranks) > 1 and known.base is not store_of_ranks()):
            known = cls._known[ranks] = cls(ranks)
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
                self._store.set(f"{self.round} of {self._rank}", _CAME)
                yield self
            except BaseException as error:
                kind = "TimeoutError" if isinstance(error, TimeoutError) else "RuntimeError"
                text = (
                    f"ranks: expected all of them to take part, got rank {self._rank}: "
                    f"{type(error).__name__}: {error}; nothing is published: call again on every "
                    "rank once that is repaired"
                )
                while not self._settle(text, kind):  # a round that has ended well stays so
                    self.round += 1
                self.round += 1
                raise

    def gather(self, call: str, value: Any, patience: float, longer: float = 0.0) -> list[Any]:
        """Wait until every rank makes the same call, and return the values of all, in JSON's types.

        It waits for ``patience`` seconds, and so much ``longer`` for ranks that are in the block.
        """
        if len(self.ranks) < 2:
            return [value]
        key = str(self.round)
        brought = {rank: f"{key} of {rank}" for rank in self.ranks}
        self._store.set(brought[self._rank], json.dumps([call, value]))
        if self._store.add(f"{key} came", 1) == len(self.ranks):
            self._settle([json.loads(self._store.get(each)) for each in brought.values()])
            last = self.round - 1  # which nobody looks at any more
            for old in (f"{last}", f"{last} came", *(f"{last} of {rank}" for rank in self.ranks)):
                self._store.delete_key(old)
        began = time.monotonic()
        while not self._store.check([key]):
            if (waited := time.monotonic() - began) > patience:
                wanting = (None, _CAME) if (is_over := waited > patience + longer) else (None,)
                late = [str(rank) for rank in self.ranks if self._said(rank) in wanting]
                if late or is_over:
                    self._settle(
                        f"ranks: expected all of {list(self.ranks)} to make this call within "
                        f"{patience} s, got none by rank {', '.join(late)}; make it on every rank, "
                        "or raise rank_timeout",
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

    def outcome(self, call: str, patience: float) -> None:
        """Wait until every rank has done its part of a call; errors are those of :meth:`gather`."""
        self.gather(f"end of {call}", None, patience)

    def _said(self, rank: int) -> str | None:
        key = f"{self.round} of {rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _settle(self, value: Any, error: str | None = None) -> bool:
        """Give the round its outcome if it has none, and return whether that is an error."""
        outcome = json.dumps([error, value])
        return json.loads(self._store.compare_set(str(self.round), "", outcome))[0] is not None
