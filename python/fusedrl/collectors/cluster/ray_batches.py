"""The batches of a Ray collector: what its actors are asked for, and what they have answered."""

from __future__ import annotations

from typing import Any, NamedTuple

from tensordict import TensorDictBase, lazy_stack

from fusedrl.collectors.batch_stream import BatchStream, Rest
from fusedrl.collectors.cluster.dialog_actor import BETWEEN, Collected
from fusedrl.collectors.progress import BatchFacts
from fusedrl.transport import deserialize


class Shares(NamedTuple):
    """What actors have collected, by the references under which it was requested.

    The batch joins their dialogs. It is ``None`` if a replay buffer has them already.
    """

    answers: dict[Any, Collected]
    batch: TensorDictBase | None
    tokens: int | None
    oldest: Any


class RayBatches(BatchStream):
    """Requests batches from the actors: a share of each, or whichever is ready first.

    Args:
        collector: has the actors; the arguments are those of :class:`BatchStream`.
        buffer: the buffer that is extended here, if any.
        max_staleness: as for the collector.

    Attributes:
        turns: turns that each actor ran.
        under_way: actors by the reference to a batch that is not counted yet.
    """

    counter = "RayLLMCollector.stale_turns"

    def __init__(self, collector: Any, buffer: Any, max_staleness: int | None) -> None:
        super().__init__(collector, buffer, max_staleness)
        self.turns: dict[int, int] = {}
        self._stale: dict[int, int] = {}  # turns that each actor dropped
        self.under_way: dict[Any, int] = {}
        self._over: set[int] = set()  # actors that have run all of their turns

    @property
    def stale_turns(self) -> int:
        """Turns that ``max_staleness`` dropped."""
        return sum(self._stale.values()) + self.dropped

    def rest(self, bar: Any) -> Rest:
        """An iterator; an exception of an actor ends the actors."""
        self._over.clear()  # another state may have been loaded
        return Rest(self, bar, self._end_actors)

    def _end_actors(self) -> None:
        if not self.background.is_current():
            self._collector.shutdown(raise_on_error=False)

    def check(self) -> None:
        """As for :class:`BatchStream`, and that there are actors."""
        self._collector.require_open()
        super().check()

    @property
    def _waits_for_all(self) -> bool:
        return self._collector.sync_iter and not self.background.is_current()

    def ask(self) -> None:
        """Let every idle actor collect that has turns left."""
        busy = self._over.union(self.under_way.values())
        for index, actor in enumerate(self._collector.actors):
            if index not in busy:
                collect = actor.collect.options(concurrency_group=BETWEEN)
                self.under_way[collect.remote()] = index

    def _wait(self) -> Shares | None:
        """Wait for a batch of each actor, or only for the first that is ready."""
        import ray

        self.ask()
        answers: dict[Any, Collected] = {}
        waiting = list(self.under_way)
        while waiting:
            (reference,), waiting = ray.wait(waiting)
            answers[reference] = ray.get(reference)
            if not self._waits_for_all and not answers[reference].over:
                break
        if not answers:
            return None
        in_order = sorted(answers, key=self.under_way.__getitem__)
        collected = [answers[one] for one in in_order if not answers[one].over]
        batches = [deserialize(one.batch) for one in collected if one.batch is not None]
        tokens = [one.tokens for one in collected if one.tokens is not None]
        oldest = min((one.oldest for one in collected if one.oldest is not None), default=None)
        batch = _joined(batches) if batches else None
        return Shares(answers, batch, sum(tokens) if tokens else None, oldest)

    def _facts(self, arrived: Shares) -> BatchFacts:
        return BatchFacts(self._collector, None, tokens=arrived.tokens, oldest=arrived.oldest)

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

    def forget(self) -> None:
        """Drop everything that was collected so far."""
        self.under_way.clear()
        super().forget()

    def count_on(self, turns: list[int], batches: int) -> None:
        """Go on from the counts of a state: the turns of each actor, and all batches."""
        self._over.clear()
        self.turns, self.frames, self.batches = dict(enumerate(turns)), sum(turns), batches


def _joined(batches: list[TensorDictBase]) -> TensorDictBase:
    """Concatenate the dialogs of several actors without a copy; columns may be ragged."""
    if len(batches) == 1:
        (batch,) = batches
        return batch
    return lazy_stack([row for batch in batches for row in batch.unbind(0)])
