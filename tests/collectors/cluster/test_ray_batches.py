"""RayLLMCollector's iteration, with actors that answer at once."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fusedrl import RayLLMCollector
from fusedrl.collectors.cluster.dialog_actor import Collected
from fusedrl.transport import serialize

ray = pytest.importorskip("ray")

BATCHES = 2


class FakeActor:
    """Collects when it is told to; a reference to a batch is its number and the actor's index."""

    def __init__(self, index: int) -> None:
        self.index, self.sent = index, 0
        self.collect = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.send))

    def send(self) -> tuple[int, int]:
        self.sent += 1
        return self.sent, self.index


def collected(reference: tuple[int, int]) -> Collected:
    number, index = reference
    if number > BATCHES:
        return Collected(None, BATCHES, 0, over=True)
    row = torch.tensor([10 * number + index])
    return Collected(serialize(TensorDict(row=row, batch_size=(1,))), number, 0)


class Offline(RayLLMCollector):
    """A collector of the fake actors."""

    closed = False

    def __init__(self, sync_iter: bool, buffer: Any = None) -> None:
        self.progress = self.verbose = False
        self.total_frames, self.requested_frames_per_batch = float("inf"), 2
        self.sync_iter, self.replay_buffer, self._tracker = sync_iter, buffer, None
        self.actors = [FakeActor(index) for index in range(2)]
        self._begin(None)


class ListBuffer(list):
    """A replay buffer as far as a collector knows one."""

    _storage = None

    def extend(self, data: Any) -> None:
        self.append(data["row"].tolist())


@pytest.fixture(autouse=True)
def _nothing_is_waited_for(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get", collected)
    monkeypatch.setattr(ray, "wait", lambda waiting, **_: (waiting[:1], waiting[1:]))


@pytest.mark.parametrize("sync_iter", [True, False])
def test_ctrl_c_in_a_wait_loses_no_batch(sync_iter, monkeypatch):
    shares = [[10 * n + index for index in range(2)] for n in range(1, BATCHES + 1)]
    wanted = shares if sync_iter else sorted([row] for share in shares for row in share)
    collector, got, wait = Offline(sync_iter), [], ray.wait
    for waits in range(6):
        left = [waits]

        def interrupted(waiting: Any, left: list[int] = left, **_: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                raise KeyboardInterrupt
            return wait(waiting)

        monkeypatch.setattr(ray, "wait", interrupted)
        with suppress(KeyboardInterrupt):
            for batch in collector:
                got.append(batch["row"].tolist())
    monkeypatch.setattr(ray, "wait", wait)
    got += [batch["row"].tolist() for batch in collector]
    assert (got if sync_iter else sorted(got)) == wanted
    assert collector._frames == 2 * BATCHES and collector._iter == len(wanted) - 1


def test_what_ctrl_c_breaks_off_begins_again_with_its_batch():
    class Broken(ListBuffer):
        def extend(self, data: Any) -> None:
            if not self:
                self.append("broken off")
                raise KeyboardInterrupt
            super().extend(data)

    collector = Offline(True, Broken())
    with pytest.raises(KeyboardInterrupt):
        list(collector)
    assert list(collector) == [None] * BATCHES
    assert collector.replay_buffer[1:] == [[10 * n, 10 * n + 1] for n in range(1, BATCHES + 1)]
    assert collector._frames == 2 * BATCHES and collector._iter == BATCHES - 1


def test_the_version_is_asked_for_once_a_batch():
    """The actors are asked for it, by a bar and by a bound on staleness."""
    asked = []

    class Counted(Offline):
        policy_version = property(lambda self: asked.append(None) or 0)

    collector = Counted(True)
    collector.verbose, collector.max_staleness = True, None
    collector._batches.max_staleness = 1
    assert len(list(collector)) == len(asked) == BATCHES


def test_a_bound_on_staleness_that_cannot_be_counted_is_refused():
    collector = Offline(True)
    with pytest.raises(ValueError, match="max_staleness: expected integer versions"):
        collector.max_staleness = 1
    assert collector.max_staleness is None


def test_a_loop_that_is_left_has_its_batch():
    collector = Offline(True)
    first = [batch["row"].tolist() for batch in islice(collector, 1)]
    assert first == [[10, 11]]
    assert next(iter(collector))["row"].tolist() == [20, 21]
    assert collector.next() is None
