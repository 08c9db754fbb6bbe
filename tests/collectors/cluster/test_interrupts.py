"""Ctrl-C at any line of RayLLMCollector's iteration, with actors that answer at once."""

from __future__ import annotations

import linecache
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from fusedrl import RayLLMCollector
from fusedrl.collectors import batch_stream
from fusedrl.collectors.cluster import ray_llm_collector
from fusedrl.collectors.cluster.dialog_actor import Collected
from fusedrl.collectors.interrupts import uninterrupted
from fusedrl.transport import serialize

ray = pytest.importorskip("ray")

BATCHES = 2
OURS = {
    batch_stream.__file__,
    ray_llm_collector.__file__,
    sys.modules[uninterrupted.__module__].__file__,
}


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


@contextmanager
def ctrl_c_at(line: int) -> Iterator[Callable[[], bool]]:
    """SIGINT before a line of ours runs, counted from the first; asks whether there was such one.

    Between a batch's last line here and its yield or return there is no call: no signal is handled
    there, though a tracer would be called.
    """
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in OURS:
            return None
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event == "line" and text not in ("yield batch", "return batch"):
            left -= 1
            if left == -1:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: left < 0
    finally:
        sys.settrace(before)


def take(collector: Offline, by_next: bool, got: list[Any]) -> None:
    """All that comes, until the end or Ctrl-C."""
    iterator = iter(collector.next, None) if by_next else collector
    for batch in iterator:
        got.append(batch["row"].tolist())


@pytest.mark.parametrize(("sync_iter", "by_next"), [(True, False), (True, True), (False, False)])
def test_no_batch_is_lost_or_comes_twice(sync_iter, by_next):
    shares = [[10 * n + index for index in range(2)] for n in range(1, BATCHES + 1)]
    wanted = shares if sync_iter else sorted([row] for share in shares for row in share)
    line, interrupted = 0, True
    while interrupted:
        collector, got = Offline(sync_iter), []
        with ctrl_c_at(line) as interrupted_now:
            with suppress(KeyboardInterrupt):
                take(collector, by_next, got)
            interrupted = interrupted_now()
        take(collector, by_next, got)
        assert (got if sync_iter else sorted(got)) == wanted, line
        assert collector._frames == 2 * BATCHES and collector._iter == len(wanted) - 1
        line += 1
    assert line > 50


def test_a_replay_buffer_gets_each_batch_once():
    line, interrupted = 0, True
    while interrupted:
        collector = Offline(True, ListBuffer())
        with ctrl_c_at(line) as interrupted_now:
            try:
                for nothing in collector:
                    assert nothing is None
            except KeyboardInterrupt:
                pass
            interrupted = interrupted_now()
        list(collector)
        wanted = [[10 * n, 10 * n + 1] for n in range(1, BATCHES + 1)]
        assert collector.replay_buffer == wanted, line
        line += 1
    assert line > 50


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


def test_a_second_ctrl_c_does_not_wait():
    reached = []

    def twice() -> None:
        with uninterrupted():
            for number in range(2):
                signal.raise_signal(signal.SIGINT)
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_loop_that_is_left_has_its_batch():
    collector = Offline(True)
    first = [batch["row"].tolist() for batch in islice(collector, 1)]
    assert first == [[10, 11]]
    assert next(iter(collector))["row"].tolist() == [20, 21]
    assert collector.next() is None
