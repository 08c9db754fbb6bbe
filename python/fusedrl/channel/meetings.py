"""Points at which all of some ranks come together, each with one outcome for all of them."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fusedrl.channel.checks import MAX_VERSION, count
from fusedrl.channel.memory import FullError
from fusedrl.compat.torch import store_of_ranks

_PAUSE = 0.02  # seconds between two looks at the store, at most


class Meetings:
    """Meetings of some ranks, one after the other, through the store of their process group.

    If a rank does not come to a meeting, or has an error before it, all others have an error, also
    those that come later. As each meeting has one outcome, ranks stay in step.

    Args:
        name: tells them from other meetings of the same ranks.
        ranks: the global ranks that take part, this one among them.

    Attributes:
        number: of the next meeting, equal on all ranks.
        version: that the ranks published last; ``None`` before the first.
    """

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.number = 0
        self.version: int | None = None
        self.base = store_of_ranks()
        self._store = distributed_c10d.PrefixStore(f"fusedrl {name}", self.base)
        self._rank = dist.get_rank()
        self._calls = threading.Lock()
        self._known: BaseException | None = None  # an error that is the outcome of a meeting

    def meet(
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
        key, store = str(self.number), self._store
        store.set(f"rank {self._rank}", json.dumps([self.number, state]))
        if store.add(f"{key} came", 1) == len(self.ranks):
            try:
                outcome = {"value": decide(self._states())}
            except ValueError as error:
                outcome = {"error": "ValueError", "text": str(error), "rank": None}
            self._settle(outcome)
            for old in (str(self.number - 1), f"{self.number - 1} came"):
                store.delete_key(old)
        deadline, pause = time.monotonic() + patience, 1e-4
        while not store.check([key]):
            if time.monotonic() > deadline:
                self._settle({"error": "TimeoutError", "text": self._late(patience), "rank": None})
                break
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE)
        outcome = json.loads(store.get(key))
        self.number += 1
        if "error" in outcome:
            self._known = _error(**outcome)
            raise self._known
        return outcome["value"]

    @contextmanager
    def telling(self) -> Iterator[None]:
        """A call that all ranks make; an error in it is one on every rank."""
        with self._calls:
            try:
                yield
            except BaseException as error:
                if error is not self._known:
                    self._tell(error)
                raise
            finally:
                self._known = None

    def _tell(self, error: BaseException) -> None:
        """Make an error the outcome of the first meeting that has none."""
        text = f"{error} (on rank {self._rank})" if isinstance(error, FullError) else str(error)
        outcome = {"error": type(error).__name__, "text": text, "rank": self._rank}
        while "error" not in self._settle(outcome):
            self.number += 1
        self.number += 1

    def _settle(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """The outcome of the next meeting: this one, if it has none yet."""
        return json.loads(self._store.compare_set(str(self.number), "", json.dumps(outcome)))

    def _states(self) -> dict[int, Any]:
        return {rank: json.loads(self._store.get(f"rank {rank}"))[1] for rank in self.ranks}

    def _late(self, patience: float) -> str:
        store, names = self._store, {rank: f"rank {rank}" for rank in self.ranks}
        here = {r for r, n in names.items() if store.check([n])}
        late = [
            str(rank)
            for rank, name in names.items()
            if rank not in here or json.loads(store.get(name))[0] != self.number
        ]
        return (
            f"ranks: expected all of {list(self.ranks)} to make this call within {patience} s, got "
            f"none by rank {', '.join(late)}; make it on every rank, or raise rank_timeout"
        )


def _error(error: str, text: str, rank: int | None) -> Exception:
    kinds = {"ValueError": ValueError, "TimeoutError": TimeoutError}
    if rank is None:
        return kinds[error](text)
    if error == "FullError":  # names the rank itself
        return FullError(text)
    return RuntimeError(
        f"ranks: expected all of them to take part, got rank {rank}: {error}: {text}; nothing is "
        "published: call again on every rank once that is repaired"
    )


_MEETINGS: dict[tuple[int, ...], Meetings] = {}


def meetings_of(ranks: tuple[int, ...]) -> Meetings:
    """The meetings of ranks that have no others in common yet."""
    known = _MEETINGS.get(ranks)
    if known is None or known.base is not store_of_ranks():  # of a group that has ended
        known = _MEETINGS[ranks] = Meetings(f"of {list(ranks)}", ranks)
    return known


def publish_together(
    channel: Any,
    meetings: Meetings,
    version: int | None,
    limit: float,
    find: Callable[[], list[Any]],
    leads: bool | None = None,
    spread: Callable[[Any], None] = lambda flat: None,
) -> int:
    """Publish one version on all ranks that have slots, or none on any.

    Args:
        channel: of this rank.
        meetings: of all ranks, each of which calls this.
        version: its number, read on the first rank that leads; one more if ``None``.
        limit: seconds that a rank waits for a free slot.
        find: finds the places of the weights.
        leads: whether this rank decides on the number; ``None`` if it has slots.
        spread: sends the bytes of a slot that was written here, or receives them.

    Returns:
        The version.

    Raises:
        Exception: as :meth:`Meetings.meet`, or what this rank cannot do, which is told to all.
    """
    patience, holds = channel.rank_timeout, channel.holds
    with meetings.telling():
        if version is not None:
            count("version", version, 0, MAX_VERSION)
        last = -1 if channel.version is None else channel.version
        state = [channel.layout.hash, last, version, holds if leads is None else leads]
        version = meetings.meet(patience, state, _next_version)
        places = find()
        with channel.writing(version, timeout=limit) if holds else nullcontext() as writing:
            sharded = 0 if leads is not None else sum(p.sharded for p in places)
            meetings.meet(patience + limit, sharded, _same_shards)
            with _interrupted_later():
                if places:
                    channel.layout.write(places, writing and writing.views)
                spread(writing)
            meetings.meet(patience + limit)
        meetings.version = version
    assert version is not None
    return version


def refuse_layouts(hashes: dict[int, str]) -> None:
    """Raise ``ValueError`` where ranks have different layouts."""
    if len(set(hashes.values())) > 1:
        named = ", ".join(f"rank {rank}: {text[:12]}" for rank, text in hashes.items())
        raise ValueError(
            f"channel: expected one layout on all ranks, got {named}; create all channels with "
            "the same names, shapes and dtypes"
        )


def _next_version(states: dict[int, Any]) -> int:
    refuse_layouts({rank: layout for rank, (layout, *_) in states.items()})
    last = max(last for _, last, _, _ in states.values())
    wanted = next(wanted for _, _, wanted, leads in states.values() if leads)
    if wanted is None:
        return max(last, 0) + 1
    if wanted <= last:
        raise ValueError(
            f"version: expected more than the {last} that is published, got {wanted}; versions "
            "only grow: leave it out for the next one"
        )
    return wanted


def _same_shards(states: dict[int, int]) -> None:
    if len(set(states.values())) > 1:
        named = ", ".join(f"rank {rank}: {count}" for rank, count in states.items())
        raise ValueError(
            f"weights: expected as many sharded tensors on every rank, got {named}; publish the "
            "same model everywhere"
        )


@contextmanager
def _interrupted_later() -> Iterator[None]:
    """Let Ctrl-C take effect after the block: others wait in its collectives for this rank."""
    came: list[Any] = []
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    signal.signal(signal.SIGINT, lambda *args: came.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        former(*came[0])
