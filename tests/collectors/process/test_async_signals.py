"""AsyncCollector under signals: Ctrl-C at any time, and a worker that is stopped."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from async_workers import Loading
from torchrl.testing.mocking_classes import CountingEnv

from .ends import is_there, until

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]


class Storm:
    """Calls a function again and again, most times of which Ctrl-C breaks off."""

    def __init__(self, hits: int) -> None:
        self.left, self.armed = hits, False

    def interrupt(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            self.left -= 1
            raise KeyboardInterrupt

    def send(self) -> None:
        times = random.Random(0)
        while self.left > 0:
            time.sleep(times.uniform(0, 0.004))
            os.kill(os.getpid(), signal.SIGINT)

    def run(self, function: Callable[[], None]) -> None:
        handler = signal.signal(signal.SIGINT, self.interrupt)
        sender = threading.Thread(target=self.send)
        sender.start()
        while self.left > 0:
            try:
                self.armed = True
                function()
                self.armed = False
            except KeyboardInterrupt:
                pass
        sender.join()
        signal.signal(signal.SIGINT, handler)


def open_files(*pids: int) -> list[int]:
    """The fewest of some looks: a batch that arrives has a descriptor until it is mapped."""
    gc.collect()
    looks = []
    for _ in range(20):
        looks.append([len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids])
        time.sleep(0.005)
    return [min(counts) for counts in zip(*looks, strict=True)]


def segments(*pids: int) -> list[int]:
    gc.collect()
    return [Path(f"/proc/{pid}/maps").read_text().count("fusedrl-batch") for pid in pids]


@pytest.mark.parametrize("hits", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_ctrl_c_tears_no_batch_and_leaves_nothing(make, hits):
    collector = make(Loading, prefetch=2, max_frames_per_traj=None)
    processes = os.getpid(), collector.procs[0].pid
    large, seen = bytes(100_000), [-1]
    for _ in range(3):
        collector.next()
    before, mapped = open_files(*processes), segments(*processes)

    def use() -> None:
        counts = collector.next()["observation"].flatten().tolist()
        assert counts[0] > seen[-1] and counts == [*range(counts[0], counts[0] + 4)]
        seen.append(counts[-1])
        assert collector.getattr_env("count") > counts[-1]
        assert collector.map_fn("env.load", [(large,)]) == [large]

    Storm(hits).run(use)
    assert len(seen) > hits / 10
    last = [collector.next()["observation"][0].item() for _ in range(3)]
    assert last == [last[0], last[0] + 4, last[0] + 8]
    assert open_files(*processes) == before
    assert not collector._worker._answers
    assert max(n - before for n, before in zip(segments(*processes), mapped, strict=True)) < 8


def test_a_stopped_worker_goes_on_or_is_ended(make):
    collector = make(Loading, track_policy_version=True)
    pid, versions = collector.procs[0].pid, 1000  # more messages than a socket takes

    def increment() -> None:
        with contextlib.suppress(RuntimeError):  # it is shut down
            for _ in range(versions):
                collector.increment_version()

    first = collector.next()["observation"][0].item()
    os.kill(pid, signal.SIGSTOP)
    telling = threading.Thread(target=increment)
    telling.start()
    until(lambda: collector.policy_version > 100)
    os.kill(pid, signal.SIGCONT)
    telling.join()
    assert [collector.next()["observation"][0].item() - first for _ in range(3)] == [4, 8, 12]
    assert collector.next()["policy_version"].unique().tolist() == [versions]
    os.kill(pid, signal.SIGSTOP)
    telling = threading.Thread(target=increment, daemon=True)
    telling.start()
    until(lambda: collector.policy_version > versions + 100)
    collector.shutdown()
    assert not is_there(pid)


def test_a_fork_of_the_trainer_holds_no_worker(make):
    collector = make(CountingEnv)
    collector.next()
    pid, child = collector.procs[0].pid, os.fork()
    if not child:
        while True:
            time.sleep(60)
    try:
        collector.shutdown()
        assert not is_there(pid)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
