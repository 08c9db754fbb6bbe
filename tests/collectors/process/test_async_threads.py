"""AsyncCollector where several threads use it, and where its own thread fails."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import pytest
from async_workers import Deaf, Failing, Loading, Parent, Slow, SlowToTell, no_env
from children import end_by_signals
from counting_dialogs import Counting, policy
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import CountingEnv

from fusedrl import LLMCollector

from .ends import LONG_S, is_there, runs, until

pytestmark = pytest.mark.usefixtures("forked")


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


def test_big_calls_beside_a_thread_that_collects(make):
    """Longer than what a pipe takes in one piece, in both directions."""
    collector = make(Loading, replay_buffer=buffer())
    collector.start()
    data = b"x" * 300_000

    def call() -> bool:
        return all(collector.map_fn("env.load", [(data,)]) == [data] for _ in range(30))

    assert at_once(call, call) == [True, True]
    assert collector.is_running()
    collector.async_shutdown()


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
    "shutdown": lambda collector: collector.shutdown(),
    "iterate": lambda collector: next(iter(collector)),
    "next": lambda collector: collector.next(),
    "start": lambda collector: collector.start(),
    "update": lambda collector: collector.update_policy_weights_(),
    "call": lambda collector: collector.reset(),
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


def test_an_exception_of_the_block_is_not_hidden(make):
    def block() -> None:
        with make(replay_buffer=Full()) as collector:
            collector.start()
            collector._thread.join(LONG_S)
            raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        block()


def test_nobody_iterates_beside_the_thread(make):
    collector = make(Loading, replay_buffer=buffer())
    collector.start()
    with pytest.raises(RuntimeError, match="iterated or start"):
        next(iter(collector))


def test_shutdown_of_several_threads_and_again(make, tmp_path):
    collector = make(partial(Slow, str(tmp_path)), replay_buffer=buffer())
    pid = collector.procs[0].pid
    collector.start()
    until((tmp_path / "steps").exists)
    at_once(*[collector.shutdown] * 3)
    assert collector.closed and not is_there(pid) and not collector.is_running()
    collector.shutdown()


def test_shutdown_that_ctrl_c_breaks_off_can_be_called_again(make, tmp_path):
    """As if it came while the worker, which does not end, is waited for."""
    collector = make(partial(Deaf, str(tmp_path)))
    pid = collector.procs[0].pid
    collector._worker.ask(0, 1)
    until((tmp_path / "steps").exists)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    process = collector._worker.process
    process.join, join = interrupt, process.join
    with pytest.raises(KeyboardInterrupt):
        collector.shutdown()
    process.join = join
    assert is_there(pid)
    collector.shutdown(timeout=0.1)
    assert not is_there(pid)


def test_a_stopped_worker_can_be_shut_down(make, tmp_path):
    collector = make(partial(Slow, str(tmp_path)))
    pid = collector.procs[0].pid
    os.kill(pid, signal.SIGSTOP)
    collector.shutdown(timeout=LONG_S)
    assert (tmp_path / "closed").exists() and not is_there(pid)


def test_a_worker_that_is_alive_is_called_so(make, tmp_path):
    collector = make(partial(Slow, str(tmp_path)), timeout=0.2)
    with pytest.raises(TimeoutError, match="raise timeout"):
        collector.next()


def test_a_killed_worker_whose_child_lives_on(make, tmp_path):
    """The child holds the worker's ends of all pipes open."""
    collector = make(partial(Parent, str(tmp_path)), prefetch=0)
    collector.next()
    pid, child = map(int, (tmp_path / "pids").read_text().split())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exit code -9"):
        collector.next()
    assert runs(child)
    os.kill(child, signal.SIGKILL)


def test_half_a_message_of_a_killed_worker_is_not_waited_for(make, tmp_path):
    """Its child, which lives on, holds its end of the connection open."""
    collector = make(partial(Parent, str(tmp_path)), prefetch=0)
    pid, child = map(int, (tmp_path / "pids").read_text().split())
    with pytest.raises(RuntimeError, match="exit code -9"):
        collector.map_fn("env.tell_half")
    assert runs(child) and not runs(pid)
    os.kill(child, signal.SIGKILL)


def test_the_end_of_a_worker_that_tells_of_an_error(make, tmp_path, capfd):
    """It prints no traceback of its own."""
    collector = make(policy=Failing(SlowToTell, str(tmp_path)))
    collector._worker.ask(0, 2)
    until((tmp_path / "telling").exists)
    collector.shutdown(timeout=LONG_S)
    assert "Stop" not in capfd.readouterr().err


class Unreadable:
    """A message whose pickle cannot be read."""

    def __reduce__(self) -> Any:
        return pickle.loads, (b"no pickle",)


def test_what_the_listener_cannot_read_is_the_end_of_the_worker(make):
    collector = make(Loading)
    pid = collector.procs[0].pid
    collector._worker._outbox.put(Unreadable())
    with pytest.raises(Exception, match=r"pickle|load key|opcode") as raised:
        collector.reset()
    assert "_listen" in str(raised.value.__cause__)
    until(lambda: not runs(pid))


def test_values_and_errors_of_a_class_that_nobody_can_import(make):
    class Own(Exception):
        pass

    def fail() -> None:
        raise Own("raised")

    collector = make(Loading, prefetch=0)
    (value,) = collector.map_fn("env.load", [(Own("sent"),)])
    assert type(value) is Own and value.args == ("sent",)
    collector.pre_collect_hook = fail
    with pytest.raises(Own, match="raised"):
        collector.next()


def test_what_the_trainer_cannot_read_is_an_error_of_all_calls(make, monkeypatch):
    collector = make(Loading)

    def fail(*_: Any) -> None:
        raise ValueError("torn")

    monkeypatch.setattr(collector._worker, "_take", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="messages that can be read, got ValueError: torn"):
            collector.map_fn("env.load", [(1,)])


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
    assert b"forked from it" in os.read(reading, 1000)
    os.close(reading)
    os.wait()
    assert collector.next()["observation"][0].item() == 4


def test_batches_that_nobody_would_get_are_not_made(make):
    collector = make(Loading, total_frames=12, prefetch=5)
    assert len(list(collector)) == 3
    assert collector.getattr_env("count") == 12


def test_the_workers_end_is_told_once_for_each_batch(make):
    """Iterating once more ends at once, whatever was asked for."""
    dialogs = {"dialog_turns_per_batch": 4, "total_dialog_turns": 8, "frames_per_batch": None}
    collector = make(Counting, policy, collector_class=LLMCollector, prefetch=2, **dialogs)
    state = collector.state_dict()
    for _ in range(2):
        assert len(list(collector)) == 2
        for _ in range(4):
            collector._worker.ask(collector._batches.number, 2)
            assert collector.next() is None
        collector.load_state_dict(state)


def test_use_buffers_are_the_workers(make):
    assert make(Loading)._use_buffers is True
    assert make(Loading, use_buffers=False)._use_buffers is False


def test_no_thread_is_left(make):
    with pytest.raises(ValueError, match="today"):
        make(no_env)
    collector = make(Loading)
    collector.next()
    collector.shutdown()
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("fusedrl-") for name in names)
