"""AsyncCollector where several threads use it, and where its own thread fails."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
from async_workers import Endless, Failing, Loading, Parent, Slow, released
from children import end_by_signals
from counting_dialogs import Counting, policy
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import CountingEnv

from fusedrl import LLMCollector

from .ends import LONG_S, is_there, runs, until

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]


def at_once(*targets: Callable[[], Any]) -> list[Any]:
    """What functions return that run in a thread each."""
    got: list[Any] = [None] * len(targets)

    def run(index: int) -> None:
        got[index] = targets[index]()

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(targets))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
        assert not thread.is_alive()
    return got


def buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyTensorStorage(100))


def test_threads_that_iterate_share_the_batches(make):
    collector = make(partial(CountingEnv, max_steps=1000), frames_per_batch=2, total_frames=200)

    def take() -> list[Any]:
        return [frame for batch in collector for frame in batch["observation"].flatten().tolist()]

    assert sorted(chain(*at_once(take, take, take))) == list(range(200))


def test_each_thread_gets_the_answers_to_its_calls(make):
    collector = make(Loading, prefetch=2)

    def call(name: int) -> bool:
        own = [(name, number) for number in range(40)]
        return [collector.map_fn("env.load", [(x,)])[0] for x in own] == own

    def iterate() -> bool:
        batches = [collector.next() for _ in range(40)]
        return [batch["observation"][0].item() for batch in batches] == list(range(0, 160, 4))

    assert at_once(*[partial(call, n) for n in range(3)], iterate) == [True] * 4


def test_resets_of_another_thread_keep_batches_whole(make):
    collector = make(Loading, prefetch=2)
    kept = []

    def iterate() -> bool:
        for _ in range(60):
            batch = collector.next()
            kept.append((batch, batch.clone()))
        return all((batch == copied).all() for batch, copied in kept)

    def reset() -> bool:
        for _ in range(20):
            collector.reset()
        return True

    assert at_once(iterate, reset) == [True, True]
    for batch, _ in kept:
        assert batch["observation"].diff(dim=0).eq(1).all()


class Full:
    """A buffer that takes nothing."""

    def extend(self, batch: Any) -> None:
        raise OSError("full")


FAILURES: dict[str, Any] = {
    "policy": ({"policy": Failing(LookupError, "lost"), "replay_buffer": None}, LookupError),
    "worker": ({"policy": Failing(), "replay_buffer": None}, RuntimeError),
    "buffer": ({"replay_buffer": Full()}, OSError),
    "postproc": ({"postproc": 1, "replay_buffer": None}, TypeError),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "async_shutdown": lambda collector: collector.async_shutdown(),
    "next": lambda collector: collector.next(),
    "start": lambda collector: collector.start(),
    "update": lambda collector: collector.update_policy_weights_(),
}


@pytest.mark.parametrize(
    ("why", "call"),
    [*((why, "async_shutdown") for why in FAILURES), *(("policy", call) for call in CALLS)],
)
def test_what_ends_the_thread_is_logged_and_raised_by_the_next_call(make, caplog, why, call):
    options, error = FAILURES[why]
    options = {name: buffer() if value is None else value for name, value in options.items()}
    collector = make(**options)
    collector.start()
    collector._thread.join(LONG_S)
    assert not collector.is_running()
    assert caplog.text.count("collecting in the background failed") == 1
    assert error.__name__ in caplog.text
    with pytest.raises(error) as raised:
        CALLS[call](collector)
    if why == "policy":
        assert str(raised.value.__cause__).count("Traceback") == 1
    collector.async_shutdown()  # it is raised once


def test_nobody_iterates_beside_the_thread(make):
    collector = make(Loading, replay_buffer=buffer())
    collector.start()
    with pytest.raises(RuntimeError, match="iteration or start"):
        next(iter(collector))


def test_shutdown_of_several_threads_and_again(make, tmp_path):
    collector = make(partial(Slow, str(tmp_path)), replay_buffer=buffer())
    pid = collector.procs[0].pid
    collector.start()
    until((tmp_path / "steps").exists)
    at_once(*[collector.shutdown] * 3)
    assert collector.closed and not is_there(pid) and not collector.is_running()
    collector.shutdown()


def test_a_batch_that_is_never_unpickled_holds_no_shutdown(make, monkeypatch):
    monkeypatch.setattr("fusedrl.collectors.process.worker_handle.KILL_S", 0.1)
    collector = make(
        Counting,
        lambda turn: policy(turn).set_non_tensor("x", Endless()),
        collector_class=LLMCollector,
    )
    collector._worker.ask(1)
    until(lambda: "wait_elsewhere" in stack_of(collector._worker._thread))
    collector.shutdown(timeout=0.1)
    until(lambda: not runs(collector._worker.pid))
    released.set()
    collector._worker._thread.join(LONG_S)
    collector._worker.stop(0)  # what it has mapped


def stack_of(thread: threading.Thread) -> str:
    return "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))


def test_a_worker_that_is_alive_is_called_so(make, tmp_path):
    collector = make(partial(Slow, str(tmp_path)), timeout=0.2)
    with pytest.raises(TimeoutError, match="raise timeout"):
        collector.next()


def test_a_killed_worker_takes_its_child_along(make, tmp_path):
    """The child holds what the worker has open."""
    collector = make(partial(Parent, str(tmp_path)), prefetch=0)
    collector.next()
    pid, child = map(int, (tmp_path / "pids").read_text().split())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        collector.next()
    until(lambda: not runs(child))


def test_a_process_that_is_forked_from_the_trainer_has_no_collector(make):
    collector = make(Loading, prefetch=0)
    collector.next()
    reading, writing = os.pipe()
    if not os.fork():
        end_by_signals()
        told = b"nothing"
        try:
            collector.next()
        except RuntimeError as error:
            told = str(error).encode()
        collector.shutdown()
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    assert b"got a fork of it" in os.read(reading, 1000)
    os.close(reading)
    os.wait()
    assert collector.next()["observation"][0].item() == 4


def test_a_batch_that_is_taken_before_it_is_counted_is_followed_by_another(make):
    class Slow(queue.SimpleQueue):
        def put(self, item: Any, *_: Any) -> None:
            super().put(item)
            time.sleep(0.1)  # the thread that receives has lost the processor

    collector = make(Loading, timeout=5.0)
    collector._worker._batches = Slow()
    assert [collector.next()["observation"][0].item() for _ in range(4)] == [0, 4, 8, 12]


def test_batches_that_nobody_would_get_are_not_made(make):
    collector = make(Loading, total_frames=12, prefetch=5)
    assert len(list(collector)) == 3
    assert collector.getattr_env("count") == 12
