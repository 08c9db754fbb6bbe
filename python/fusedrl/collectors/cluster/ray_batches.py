"""Collects batches from actors: a share of each actor, or whichever is ready first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device

from fusedrl.collectors.cluster.dialog_actor import Collected
from fusedrl.collectors.cluster.ray_actors import Actors
from fusedrl.collectors.cluster.ray_options import buffer_client
from fusedrl.collectors.cluster.ray_weights import RayWeights
from fusedrl.collectors.interrupts import uninterrupted
from fusedrl.collectors.progress import OpenBar
from fusedrl.collectors.staleness import is_too_old
from fusedrl.transport import deserialize

logger = logging.getLogger("fusedrl")

SECONDS_TO_END = 10.0

Advance = Callable[..., None]
Bar = AbstractContextManager[Advance]


@dataclass(frozen=True)
class ActorAnswer:
    """What an actor has collected, with the reference under which it was requested."""

    reference: Any
    actor: int
    collected: Collected


@dataclass(frozen=True)
class Ready:
    """A batch that was counted; ``None`` if a replay buffer has it."""

    batch: TensorDictBase | None


class RayBatches:
    """Requests batches from the actors, counts them, and hands them out or stores them.

    A pickled copy requests batches from the same actors in another process, and starts without any.

    Args:
        actors: the actors, which have started.
        weights: the weights, which know the newest version.
        replay_buffer: the replay buffer of the collector, if any.
        extends: whether the buffer is extended here.
        sync_iter: whether a batch has a share of each actor.
        max_staleness: how many versions a batch may be behind when it is handed out.
    """

    def __init__(
        self,
        actors: Actors,
        weights: RayWeights,
        replay_buffer: Any,
        extends: bool,
        sync_iter: bool,
        max_staleness: int | None,
    ) -> None:
        self._actors, self._weights = actors, weights
        self.replay_buffer, self._extends = replay_buffer, extends
        self.sync_iter, self.max_staleness = sync_iter, max_staleness
        self.number = -1  # number of the last batch, counted from 0
        self.turns: dict[int, int] = {}  # turns that each actor ran
        self._stale: dict[int, int] = {}  # turns that each actor dropped
        self._dropped = 0  # turns dropped here
        self.under_way: dict[Any, int] = {}  # actors by the reference to a batch not yet counted
        self._over: set[int] = set()  # actors that have run all of their turns
        self._ready: Ready | None = None  # a batch that was not handed out yet
        self._bar: OpenBar | None = None  # the bar of next()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None  # the error of the thread

    def __reduce__(self) -> Any:
        """What makes a copy in another process."""
        buffer = buffer_client(self.replay_buffer)
        given = (self._actors, self._weights, buffer, self._extends)
        return RayBatches, (*given, self.sync_iter, self.max_staleness)

    @property
    def frames(self) -> int:
        """Turns that all actors ran."""
        return sum(self.turns.values())

    @property
    def stale_turns(self) -> int:
        """Turns that ``max_staleness`` dropped."""
        return sum(self._stale.values()) + self._dropped

    def rest(self, bar: Bar) -> Iterator[Any]:
        """Batches until all actors have run their turns; ``None`` each where a buffer gets them.

        An exception of an actor ends the actors.
        """
        self._over.clear()  # another process may have loaded a state
        with bar as advance:
            while (ready := self._prepare(advance)) is not None:
                # Python handles signals at calls and jumps, and so not between these two lines.
                self._ready = None
                yield ready.batch

    def next(self, bar: Callable[[], Bar]) -> TensorDictBase | None:
        """The next batch, ``None`` at the end; ``bar`` makes the bar of all such calls."""
        if self._bar is None:
            self._over.clear()
            self._bar = OpenBar(bar())
        ready = self._prepare(self._bar.advance)
        if ready is None:
            self._close_bar()  # collecting may go on with another state
            return None
        self._ready = None
        return ready.batch

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _prepare(self, advance: Advance) -> Ready | None:
        """Make the next batch ready, unless one is, and return it; ``None`` at the end."""
        self._actors.require_open()
        if self.is_running():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )
        self._refuse_copied_buffer()
        try:
            self._advance(self.sync_iter, advance)
        except Exception:
            self.end(raise_on_error=False)
            raise
        return self._ready

    def _advance(self, sync: bool, advance: Advance) -> None:
        """Make the next batch ready, or none at the end.

        Ctrl-C changes nothing while this waits for a batch and unpacks it. After that, the batch is
        counted and stored as a whole.
        """
        while self._ready is None:
            arrived = self._wait(sync)
            if not arrived:
                return
            in_order = sorted(arrived, key=lambda one: one.actor)
            collected = [one.collected for one in in_order if not one.collected.over]
            batches = [deserialize(one.batch) for one in collected if one.batch is not None]
            batch = _joined(batches) if batches else None
            with uninterrupted():
                self._count(arrived)
                if collected:
                    self.number += 1
                    self._hand_over(batch, collected, advance)
                if not sync:
                    self.ask()  # lets the actor begin its next batch

    def ask(self) -> None:
        """Let every idle actor collect that has turns left."""
        with uninterrupted():
            for index in set(self._actors.indices) - self._over - set(self.under_way.values()):
                self.under_way[self._actors.send(index, "collect")] = index

    def _wait(self, sync: bool) -> list[ActorAnswer]:
        """Wait for a batch of each actor, or only for the first that is ready."""
        import ray

        self.ask()
        arrived: list[ActorAnswer] = []
        waiting = list(self.under_way)
        while waiting:
            (reference,), waiting = ray.wait(waiting)
            actor = self.under_way[reference]
            collected = self._actors.answer(reference, actor)
            arrived.append(ActorAnswer(reference, actor, collected))
            if not sync and not collected.over:
                break
        return arrived

    def _count(self, arrived: list[ActorAnswer]) -> None:
        for one in arrived:
            del self.under_way[one.reference]
            self.turns[one.actor] = one.collected.frames
            self._stale[one.actor] = one.collected.stale
            if one.collected.over:
                self._over.add(one.actor)

    def _hand_over(
        self, batch: TensorDictBase | None, collected: list[Collected], advance: Advance
    ) -> None:
        """Make a batch ready for the iterator, or store it, unless it is too old."""
        tokens = [one.tokens for one in collected if one.tokens is not None]
        oldest = min((one.oldest for one in collected if one.oldest is not None), default=None)
        advance(tokens=sum(tokens) if tokens else None, oldest=oldest)
        if batch is not None and self._is_stale(batch, oldest):
            return
        if batch is not None and self._extends:
            buffer = self.replay_buffer
            buffer.extend(_maybe_normalize_replay_buffer_tensordict_device(batch, buffer))
            batch = None
        self._ready = Ready(batch)

    def _is_stale(self, batch: TensorDictBase, oldest: Any) -> bool:
        """Whether the batch has become too old while it waited here."""
        if self.max_staleness is None:
            return False
        late = self._weights.newest() - oldest
        if is_too_old(late, self.max_staleness, self._dropped, "RayLLMCollector.stale_turns"):
            self._dropped += batch.numel()
            return True
        return False

    def _refuse_copied_buffer(self) -> None:
        """Raise ``RuntimeError`` in a process whose replay buffer is a mere copy."""
        if self._extends and self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected a RayReplayBuffer in a collector that collects in another "
                "process than that which made it, got one of that process; collect there, or "
                "make the collector with a RayReplayBuffer"
            )

    def forget(self) -> None:
        """Drop everything that was collected so far."""
        self.under_way.clear()
        self._ready = None

    def load(self, number: int, turns: list[int]) -> None:
        """Continue the counts of a state: its last batch's number, and the turns of each actor."""
        self._over.clear()
        self.number, self.turns = number, dict(enumerate(turns))

    def start(self, bar: Bar) -> None:
        """Collect into the replay buffer in the background."""
        self._actors.require_open()
        self._refuse_copied_buffer()
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one to collect into in the background, got None; pass it "
                "when the collector is made"
            )
        if not self.is_running():
            self._error = None
            self._thread = threading.Thread(
                target=self._run, args=(bar,), name="RayLLMCollector", daemon=True
            )
            self._thread.start()

    def is_running(self) -> bool:
        """Whether it collects in the background."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self, bar: Bar) -> None:
        try:
            with bar as advance:
                while not self._actors.closed:
                    self._advance(False, advance)
                    if self._ready is None:
                        return
                    self._ready = None
        except Exception as error:
            if not self._actors.closed:
                self._error = error
                logger.exception("RayLLMCollector: collecting in the background failed")

    def end(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the actors and the thread; may be called again."""
        told = self._actors.close(close_env, SECONDS_TO_END if timeout is None else timeout)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.forget()
        self._close_bar()
        error, self._error = self._error, None
        if raise_on_error and error is not None:
            raise error
        if told:
            text = f"collectors: expected actors that close, got {'; '.join(told)}"
            if raise_on_error:
                raise RuntimeError(f"{text}; they are ended all the same")
            logger.warning("%s", text)


def _joined(batches: list[TensorDictBase]) -> TensorDictBase:
    """Concatenate the dialogs of several actors without a copy; columns may be ragged."""
    if len(batches) == 1:
        (batch,) = batches
        return batch
    return lazy_stack([row for batch in batches for row in batch.unbind(0)])
