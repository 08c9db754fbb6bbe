"""Collects batches from actors: a share of each actor, or whichever is ready first."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from tensordict import TensorDictBase, lazy_stack

from fusedrl.collectors.background import Background
from fusedrl.collectors.batch_stream import Advance, BatchStream, Ready
from fusedrl.collectors.cluster.dialog_actor import Collected
from fusedrl.collectors.cluster.ray_actors import Actors
from fusedrl.collectors.cluster.ray_weights import RayWeights
from fusedrl.collectors.interrupts import uninterrupted
from fusedrl.compat.torchrl import ray_buffer_client
from fusedrl.transport import deserialize

logger = logging.getLogger("fusedrl")

SECONDS_TO_END = 10.0


class Shares(NamedTuple):
    """What actors have collected, by the references under which it was requested.

    The batch joins their dialogs. It is ``None`` if a replay buffer has them already.
    """

    answers: dict[Any, Collected]
    batch: TensorDictBase | None
    oldest: Any
    shown: dict[str, Any]


class RayBatches(BatchStream):
    """Requests batches from the actors, counts them, and hands them out or stores them.

    A pickled copy requests batches from the same actors in another process, and starts without any.

    Args:
        actors: the actors, which have started.
        weights: the weights, which know the newest version.
        replay_buffer: the replay buffer of the collector, if any.
        extends: whether the buffer is extended here.
        sync_iter: whether a batch has a share of each actor.
        max_staleness: how many versions a batch may be behind when it is handed out.

    Attributes:
        turns: turns that each actor ran.
        under_way: actors by the reference to a batch that is not counted yet.
    """

    counter = "RayLLMCollector.stale_turns"

    def __init__(
        self,
        actors: Actors,
        weights: RayWeights,
        replay_buffer: Any,
        extends: bool,
        sync_iter: bool,
        max_staleness: int | None,
    ) -> None:
        buffer = replay_buffer if extends else None
        super().__init__(Background("RayLLMCollector"), buffer, max_staleness)
        self._actors, self._weights, self.replay_buffer = actors, weights, replay_buffer
        self._extends, self.sync_iter = extends, sync_iter
        self.turns: dict[int, int] = {}
        self._stale: dict[int, int] = {}  # turns that each actor dropped
        self.under_way: dict[Any, int] = {}
        self._over: set[int] = set()  # actors that have run all of their turns

    def __reduce__(self) -> Any:
        """What makes a copy in another process."""
        buffer = ray_buffer_client(self.replay_buffer)
        parts = (self._actors, self._weights, buffer, self._extends)
        return RayBatches, (*parts, self.sync_iter, self.max_staleness)

    @property
    def number(self) -> int:
        """The number of the last batch, counted from 0."""
        return self.batches - 1

    @property
    def stale_turns(self) -> int:
        """Turns that ``max_staleness`` dropped."""
        return sum(self._stale.values()) + self.dropped

    def rest(self, bar: AbstractContextManager[Advance]) -> Iterator[Any]:
        """As for :class:`BatchStream`; an exception of an actor ends the actors."""
        self._over.clear()  # another state may have been loaded
        return super().rest(bar)

    def _prepare(self, advance: Advance) -> Ready | None:
        self._actors.require_open()
        self._refuse_copied_buffer()
        self.background.refuse_others()
        try:
            return super()._prepare(advance)
        except Exception:
            if not self.background.is_current():
                self.end(raise_on_error=False)
            raise

    @property
    def _waits_for_all(self) -> bool:
        return self.sync_iter and not self.background.is_current()

    def ask(self) -> None:
        """Let every idle actor collect that has turns left."""
        with uninterrupted():
            for index in set(self._actors.indices) - self._over - set(self.under_way.values()):
                self.under_way[self._actors.send(index, "collect")] = index

    def _wait(self) -> Shares | None:
        """Wait for a batch of each actor, or only for the first that is ready."""
        import ray

        self.ask()
        answers: dict[Any, Collected] = {}
        waiting = list(self.under_way)
        while waiting:
            (reference,), waiting = ray.wait(waiting)
            answers[reference] = self._actors.answer(reference, self.under_way[reference])
            if not self._waits_for_all and not answers[reference].over:
                break
        if not answers:
            return None
        in_order = sorted(answers, key=self.under_way.__getitem__)
        collected = [answers[one] for one in in_order if not answers[one].over]
        batches = [deserialize(one.batch) for one in collected if one.batch is not None]
        tokens = [one.tokens for one in collected if one.tokens is not None]
        oldest = min((one.oldest for one in collected if one.oldest is not None), default=None)
        shown = {"tokens": sum(tokens) if tokens else None, "oldest": oldest}
        return Shares(answers, _joined(batches) if batches else None, oldest, shown)

    def _count(self, arrived: Shares) -> bool:
        for reference, collected in arrived.answers.items():
            actor = self.under_way.pop(reference)
            self.turns[actor] = collected.frames
            self._stale[actor] = collected.stale
            if collected.over:
                self._over.add(actor)
        self.frames = sum(self.turns.values())
        collects = not all(one.over for one in arrived.answers.values())
        self.batches += collects
        return collects

    def _request(self) -> None:
        if not self._waits_for_all:
            self.ask()

    def _lateness(self, arrived: Shares) -> int:
        return self._weights.newest() - arrived.oldest

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
        super().forget()

    def load(self, number: int, turns: list[int]) -> None:
        """Continue the counts of a state: its last batch's number, and the turns of each actor."""
        self._over.clear()
        self.turns, self.frames, self.batches = dict(enumerate(turns)), sum(turns), number + 1

    def start(self, bar: AbstractContextManager[Advance]) -> None:
        """Collect into the replay buffer in the background."""
        self._actors.require_open()
        self._refuse_copied_buffer()
        if self.replay_buffer is None:
            raise RuntimeError(
                "replay_buffer: expected one to collect into in the background, got None; pass it "
                "when the collector is made"
            )
        self.background.start(lambda: self.rest(bar))

    def end(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """End the actors and the thread; may be called again."""
        self.background.stop()
        failed = self._actors.close(close_env, SECONDS_TO_END if timeout is None else timeout)
        self.background.join()
        self.forget()
        try:
            self.background.check()
        except Exception:
            if raise_on_error:
                raise
        if failed:
            text = f"collectors: expected actors that close, got {'; '.join(failed)}"
            if raise_on_error:
                raise RuntimeError(f"{text}; they are ended all the same")
            logger.warning("%s", text)


def _joined(batches: list[TensorDictBase]) -> TensorDictBase:
    """Concatenate the dialogs of several actors without a copy; columns may be ragged."""
    if len(batches) == 1:
        (batch,) = batches
        return batch
    return lazy_stack([row for batch in batches for row in batch.unbind(0)])
