"""AsyncCollector and Ctrl-C: nothing is lost, nothing comes twice, and no answer is another's."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from async_workers import Loading
from counting_dialogs import Counting, policy
from programs import python

from fusedrl import LLMCollector

pytestmark = pytest.mark.usefixtures("forked")

TESTS = Path(__file__).parents[2]
LONG_S = 300.0  # what a broken test waits


def interrupted(function: Callable[[], Any], after: int) -> tuple[bool, Any]:
    """Call a function that Ctrl-C breaks off; whether it did, and what came, if anything.

    Python looks for signals where a function begins and where one that is written in C returns:
    it is interrupted at the one that comes ``after`` so many others.
    """
    left = after

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal left
        if event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGINT)

    got = None
    try:
        sys.setprofile(count)
        got = function()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return left <= 0, got


def under_way(collector: Any) -> int:
    """How many batches were requested beyond those that are taken or outdated."""
    worker = collector._worker
    return worker._asked - max(collector._batches.number, worker.outdated)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_ctrl_c_anywhere_in_an_iteration_loses_no_batch(make, prefetch):
    collector = make(Loading, prefetch=prefetch)

    def first() -> Any:
        for batch in collector:
            return batch

    hits = frames = 0
    while True:
        hit, batch = interrupted(first, hits + 1)
        if batch is None:
            batch = first()
        assert batch["observation"].flatten().tolist() == list(range(frames, frames + 4))
        frames += 4
        assert collector._frames == frames
        assert under_way(collector) == prefetch
        if not hit:
            break
        hits += 1
    assert hits > 30


@pytest.mark.parametrize("how", ["postproc", "stored"])
def test_what_ctrl_c_comes_into_is_done_whole_and_once(make, how):
    """A postproc or a buffer gets each batch, and no batch twice."""
    seen: list[int] = []

    class Buffer:
        def extend(self, batch: Any) -> None:
            seen.append(batch["observation"][0].item())

    def note(batch: Any) -> Any:
        seen.append(batch["observation"][0].item())
        return batch

    options = {"postproc": {"postproc": note}, "stored": {"replay_buffer": Buffer()}}
    collector = make(Loading, **options[how])
    hits, hit = 0, True
    while hit:
        hit, _ = interrupted(collector.next, hits + 1)
        hits += 1
        collector.next()
    assert seen == list(range(0, collector._frames, 4)) and hits > 30


def test_next_hands_out_no_batch_twice(make):
    """One that it has in its hands when Ctrl-C comes is as good as used."""
    collector = make(Loading)
    seen: list[int] = []
    hits, hit = 0, True
    while hit:
        hit, batch = interrupted(collector.next, hits + 1)
        hits += 1
        batches = [batch, collector.next()]
        seen += [each["observation"][0].item() for each in batches if each is not None]
        assert seen[-1] == collector._frames - 4
    assert seen == sorted(set(seen)) and hits > 30


def test_ctrl_c_anywhere_in_a_call_leaves_no_answer_to_the_next(make):
    collector = make(Loading)
    hit, number = True, 0
    while hit:
        number += 1
        call = lambda: collector.map_fn("env.load", [(-number,)])  # noqa: B023, E731
        hit, _ = interrupted(call, number)
        assert collector.map_fn("env.load", [(number,)]) == [number]
    assert number > 30


@pytest.mark.parametrize("what", ["reset", "load_state_dict"])
def test_ctrl_c_in_what_makes_batches_outdated(make, what):
    """It can be done again, and is done then; counts go on."""
    collector = make(Counting, policy, collector_class=LLMCollector, prefetch=2)
    hits, hit = 0, True
    while hit:
        collector.next()
        state, frames = collector.state_dict(), collector._frames
        function = collector.reset
        if what == "load_state_dict":
            function, frames = partial(collector.load_state_dict, {**state, "frames": 8}), 8
        hit, _ = interrupted(function, hits + 1)
        hits += 1
        function()
        assert collector._frames == frames
        assert collector.next() is not None and collector._frames == frames + 4
        assert under_way(collector) == 2
    assert hits > 20


def test_a_storm_of_ctrl_c(tmp_path):
    """Real signals, in a process of its own."""
    code = "import async_storm; async_storm.storm()"
    done = python("-c", code, env={**os.environ, "PYTHONPATH": str(TESTS)})
    assert done.returncode == 0, done.stderr
