"""Decisions of some ranks that wait for each other, each with one outcome for all of them."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedrl.channel.checks import MAX_VERSION, count
from fusedrl.channel.memory import FullError
from fusedrl.compat.torch import store_of_ranks

_PAUSE = 0.02  # seconds between two looks at the store, at most
_KINDS = {kind.__name__: kind for kind in (ValueError, TimeoutError, FullError, RuntimeError)}

_held: list[Callable[[], Any]] | None = None  # what interrupts do that came meanwhile


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Let Ctrl-C take effect after the block, or in :func:`let_interrupts_in` within it.

    Other ranks wait in collective calls for one that is within such a block.
    """
    global _held
    handler, on_main = signal.getsignal(signal.SIGINT), _is_main_thread()
    if not on_main or _held is not None or not callable(handler):
        yield
        return
    held: list[Callable[[], Any]] = []
    signal.signal(signal.SIGINT, lambda *args: held.append(partial(handler, *args)))
    try:
        _held = held
        yield
    finally:
        _held = None
        signal.signal(signal.SIGINT, handler)
        if held:
            held.pop()()


def let_interrupts_in() -> None:
    """Let an interrupt that is held back take effect here, where this rank waits."""
    if _held and _is_main_thread():
        _held.pop()()


def interrupt_later(error: BaseException) -> None:
    """Hold back what :func:`let_interrupts_in` raised."""

    def interrupt() -> None:
        raise error

    assert _held is not None
    _held.append(interrupt)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class Rendezvous:
    """Rounds in which some ranks agree on something, through the store of their process group.

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
        self._known: BaseException | None = None  # an error that is the outcome of a round

    def agree(
        self,
        patience: float,
        state: Any = None,
        decide: Callable[[dict[int, Any]], Any] = lambda states: None,
    ) -> Any:
        """Wait until every rank has come.

        Args:
            patience: seconds.
            state: of this rank, as JSON has it.
            decide: makes the outcome of the states of all ranks, on the rank that comes last.

        Returns:
            The outcome, the same on every rank.

        Raises:
            TimeoutError: ranks did not come in time; the message names them.
            ValueError: what ``decide`` raised, on every rank.
            FullError: that of another rank.
            RuntimeError: another rank had another error, which the message has.
        """
        with interrupted_later():
            let_interrupts_in()
            self._come(state, decide)
            deadline, pause = time.monotonic() + patience, 1e-4
            while not self._store.check([str(self.round)]):
                if time.monotonic() > deadline:
                    self._settle({"error": "TimeoutError", "text": self._late(patience)})
                    break
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE)
                try:
                    let_interrupts_in()
                except BaseException as error:
                    if "error" in self._settle(self._told(error)):
                        self.round, self._known = self.round + 1, error
                        raise
                    interrupt_later(error)  # all have come, and go on
            outcome = json.loads(self._store.get(str(self.round)))
            self.round += 1
            if "error" in outcome:
                self._known = _KINDS[outcome["error"]](outcome["text"])
                raise self._known
            return outcome["value"]

    @contextmanager
    def collective(self, interruptible: bool = True) -> Iterator[None]:
        """A call that all ranks make; an error in it is one on every rank.

        Args:
            interruptible: whether Ctrl-C takes effect at any line of it, or in its waits alone.
        """
        with self._calls, nullcontext() if interruptible else interrupted_later():
            try:
                yield
            except BaseException as error:
                with interrupted_later():
                    if self._known is None:
                        self._fail(error)
                raise
            finally:
                self._known = None

    def _come(self, state: Any, decide: Callable[[dict[int, Any]], Any]) -> None:
        """Tell the others that this rank is here; the last one settles the outcome."""
        key, store = str(self.round), self._store
        store.set(f"rank {self._rank}", json.dumps([self.round, state]))
        if store.add(f"{key} came", 1) < len(self.ranks):
            return
        try:
            outcome = {"value": decide(self._states())}
        except ValueError as error:
            outcome = {"error": "ValueError", "text": str(error)}
        self._settle(outcome)
        for old in (str(self.round - 1), f"{self.round - 1} came"):
            store.delete_key(old)

    def _fail(self, error: BaseException) -> None:
        """Make an error the outcome of the first round that has none."""
        while "error" not in self._settle(self._told(error)):
            self.round += 1
        self.round += 1

    def _told(self, error: BaseException) -> dict[str, Any]:
        """The outcome of a round in which this rank had an error."""
        if isinstance(error, FullError):
            return {"error": "FullError", "text": f"{error} (on rank {self._rank})"}
        text = (
            f"ranks: expected all of them to take part, got rank {self._rank}: "
            f"{type(error).__name__}: {error}; nothing is published: call again on every rank once "
            "that is repaired"
        )
        return {"error": "RuntimeError", "text": text}

    def _settle(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """The outcome of the next round: this one, if it has none yet."""
        return json.loads(self._store.compare_set(str(self.round), "", json.dumps(outcome)))

    def _states(self) -> dict[int, Any]:
        return {rank: json.loads(self._store.get(f"rank {rank}"))[1] for rank in self.ranks}

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
    limit: float,
    find: Callable[[], list[Any]],
) -> int:
    """Publish one version on all ranks that have slots, or none on any.

    Args:
        channel: of this rank.
        rendezvous: of all ranks, each of which calls this.
        version: its number, read on the first rank that has slots; one more if ``None``.
        limit: seconds that a rank waits for a free slot.
        find: finds the places of the weights.

    Returns:
        The version.

    Raises:
        Exception: as :meth:`Rendezvous.agree`, or what this rank cannot do, which is told to all.
    """
    patience, holds = channel.rank_timeout, channel.holds
    with rendezvous.collective(interruptible=False):
        if version is not None:
            count("version", version, 0, MAX_VERSION)
        last = -1 if channel.version is None else channel.version
        state = [channel.layout.hash, last, version, holds]
        version = rendezvous.agree(patience, state, _next_version)
        places = find()
        with channel.writing(version, timeout=limit) if holds else nullcontext() as writing:
            rendezvous.agree(patience + limit, sum(p.sharded for p in places), _same_shards)
            channel.layout.write(places, writing and writing.views)
            rendezvous.agree(patience + limit)
        rendezvous.version = version
    assert version is not None
    return version


def check_ends(states: dict[int, Any]) -> None:
    """Raise ``ValueError`` unless all channels have one layout, and one of the ranks has slots."""
    _refuse_layouts({rank: layout for rank, (layout, _) in states.items()})
    if not any(holds for _, holds in states.values()):
        raise ValueError(
            f"holds: expected True on one of the ranks {list(states)}, got False on all; leave it "
            "out for the first of them"
        )


def first_value(values: dict[int, Any]) -> Any:
    """The value of the first rank that has one."""
    return next((value for value in values.values() if value is not None), None)


def _refuse_layouts(hashes: dict[int, str]) -> None:
    remedy = "create all channels with the same names, shapes and dtypes"
    _refuse_others("channel: expected one layout", {r: h[:12] for r, h in hashes.items()}, remedy)


def _refuse_others(expected: str, states: dict[int, Any], remedy: str) -> None:
    if len(set(states.values())) > 1:
        named = ", ".join(f"rank {rank}: {state}" for rank, state in states.items())
        raise ValueError(f"{expected} on all ranks, got {named}; {remedy}")


def _next_version(states: dict[int, Any]) -> int:
    _refuse_layouts({rank: layout for rank, (layout, *_) in states.items()})
    last = max(last for _, last, _, _ in states.values())
    wanted = next(wanted for _, _, wanted, holds in states.values() if holds)
    if wanted is None:
        return max(last, 0) + 1
    if wanted <= last:
        raise ValueError(
            f"version: expected more than the {last} that is published, got {wanted}; versions "
            "only grow: leave it out for the next one"
        )
    return wanted


def _same_shards(states: dict[int, int]) -> None:
    expected = "weights: expected the same number of sharded tensors"
    _refuse_others(expected, states, "publish the same model on every rank")
