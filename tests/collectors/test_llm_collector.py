"""LLMCollector: what batches have, when environment and policy run, what a caller may do."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from typing import Any

import pytest
from counting_dialogs import Counting, policy, seen
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool

from fusedrl import LLMCollector
from fusedrl.collectors.versions import Versions

IDS = ("collector", "traj_ids")


def test_has_every_public_name_of_torchrls(collect):
    names = {name for name in vars(TorchrlLLMCollector) if not name.startswith("_")}
    assert {"rollout", "as_remote", "is_initialized", "dialog_turns_per_batch"} <= names
    collector = collect()
    assert names <= set(dir(collector))
    assert callable(collector.rollout) and callable(LLMCollector.as_remote)
    given = inspect.signature(TorchrlLLMCollector).parameters
    of_ray = {"_ray_trace_ctx"}  # added in a process that has made an actor of the class
    assert given.keys() - of_ray <= inspect.signature(LLMCollector).parameters.keys()


def test_no_prompt_is_lost_to_the_constructor(collect):
    calls = []
    env = Counting()
    collector = collect(env, policy=lambda turn: calls.append(1) or policy(turn))
    assert (env.resets, calls) == (0, [])
    assert seen(next(iter(collector))) == [[100, 101], [100, 101]]
    assert (env.resets, len(calls)) == (1, 2)


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize(
    "mode", [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}], ids=str
)
def test_what_a_caller_does_to_a_batch_changes_no_other(collect, mode, lazy):
    def batches(change):
        for batch in collect(Counting(2, 5, lazy), total_dialog_turns=24, **mode):
            yield seen(batch), batch[IDS].tolist()
            if change:
                batch.zero_()

    assert list(batches(True)) == list(batches(False))


def test_replay_buffer(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(20), batch_size=4)
    collector = collect(replay_buffer=buffer, total_dialog_turns=12)
    assert list(collector) == [None] * 3 and collector.flatten_data
    assert len(buffer) == 12 and seen(buffer[:4]) == [100, 101, 100, 101]


def test_a_thread_fills_the_buffer(collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(200), batch_size=4)
    collector = collect(replay_buffer=buffer, total_dialog_turns=100)
    collector.start()
    collector._stream.join(60)
    assert len(buffer) == 100
    collector.async_shutdown()
    assert not collector.is_initialized()


def test_a_reset_comes_between_the_turns_of_the_thread(collect, caplog, monkeypatch):
    begin = Versions.call

    def wait(versions):
        time.sleep(0.005)  # as for an update
        return begin(versions)

    monkeypatch.setattr(Versions, "call", wait)
    buffer = ReplayBuffer(storage=LazyStackStorage(400), batch_size=4)
    collector = collect(replay_buffer=buffer, total_dialog_turns=200)
    collector.start()
    while collector.is_running():
        time.sleep(0.002)
        collector.reset()
    assert not caplog.text
    collector.shutdown()


def test_a_shutdown_within_the_thread_is_no_failure(collect, caplog):
    def postproc(batch):
        collector.shutdown()
        return batch

    collector = collect(replay_buffer=ReplayBuffer(storage=LazyStackStorage(8)), postproc=postproc)
    collector.start()
    collector._stream.join(60)
    collector.shutdown()
    assert not caplog.text and not collector.is_initialized()


def test_a_queue_gets_single_turns(collect):
    turns = queue.Queue()
    assert list(collect(queue=turns)) == [None, None]
    got = [turns.get()["seen"].item() for _ in range(8)]
    assert got == [100, 101, 100, 101, 102, 200, 102, 103]


def test_a_full_queue_drops_its_oldest(collect, caplog):
    turns = queue.Queue(3)
    collector = collect(queue=turns)
    list(collector)
    assert [turns.get()["seen"].item() for _ in range(3)] == [200, 102, 103]
    assert caplog.text.count("the queue is full") == 1


def test_postproc_sees_whole_batches(collect):
    def postproc(batch):
        shapes.append(batch.shape)
        return batch.select("seen")

    shapes = []
    assert [sorted(batch.keys()) for batch in collect(postproc=postproc)] == [["seen"]] * 2
    collector = collect()
    collector.set_postproc(postproc)
    assert [sorted(batch.keys()) for batch in collector] == [["seen"]] * 2
    assert shapes == [(2, 2)] * 4
    with pytest.raises(TypeError, match="postproc: expected a function that returns a tensordict"):
        collect(postproc=dict).next()


def test_an_iterator_can_be_closed(collect):
    with closing(iter(collect())) as iterator:
        assert seen(next(iterator))[0] == [100, 101]
    assert seen(next(iterator))[0] == [102, 200]


def test_hooks_of_torchrl(collect):
    calls = []
    collector = collect()
    collector.pre_collect_hook = lambda: calls.append("before")
    collector.post_collect_hook = lambda batch: calls.append(tuple(batch.shape))
    list(collector)
    assert calls == ["before", (2, 2)] * 2


def test_next_ends_with_none(collect):
    collector = collect()
    assert [seen(collector.next())[0], seen(collector.next())[0]] == [[100, 101], [102, 200]]
    assert collector.next() is None


def test_rollout_is_one_batch_without_a_charge(collect):
    collector = collect(postproc=lambda batch: 1 / 0)
    assert seen(collector.rollout())[0] == [100, 101]
    assert collector.stats()["frames"] == 0


def test_reset_forgets_what_runs(collect):
    collector = collect(Counting(2, 3), yield_completed_trajectories=True, dialog_turns_per_batch=1)
    collector.rollout()
    collector.reset()
    assert seen(collector.rollout())[0] == 300
    with pytest.raises(NotImplementedError, match="index: expected None"):
        collector.reset(0)


@pytest.mark.parametrize(
    "use",
    [
        lambda collector: collector.next(),
        lambda collector: next(iter(collector)),
        lambda collector: collector.rollout(),
        lambda collector: collector.state_dict(),
        lambda collector: collector.load_state_dict({}),
    ],
    ids=["next", "iter", "rollout", "state_dict", "load_state_dict"],
)
@pytest.mark.parametrize("begun", [False, True])
def test_one_that_is_shut_down_says_so(collect, use, begun):
    collector = collect()
    if begun:
        collector.next()
    collector.shutdown()
    with pytest.raises(
        RuntimeError, match=r"collector: expected a running one, .* make another one"
    ):
        use(collector)


@pytest.mark.parametrize("pool", [False, True], ids=["env", "pool"])
def test_a_shutdown_from_another_thread_waits_for_the_turn_that_runs(collect, pool):
    """Otherwise what an environment raises when it is closed would be the error."""
    steps, goes_on = threading.Event(), threading.Event()

    class Waiting(Counting):
        def _step(self, tensordict):
            steps.set()
            assert goes_on.wait(20) and not env.is_closed
            return super()._step(tensordict)

    env: Any = AsyncEnvPool([lambda: Waiting(1)] * 2, stack="lazy") if pool else Waiting()
    env.is_closed = False
    collector = collect(env, dialog_turns_per_batch=100, total_dialog_turns=-1)
    with ThreadPoolExecutor(2) as threads:
        rollout = threads.submit(collector.rollout)
        assert steps.wait(20)
        shutdown = threads.submit(collector.shutdown)
        assert not wait([shutdown], timeout=0.2).done
        goes_on.set()
        shutdown.result(20)
        with pytest.raises(RuntimeError, match="collector: expected a running one, got one that"):
            rollout.result(20)
    assert not collector.is_initialized()


def test_environment_and_policy_know_the_collector(collect):
    class Curious:
        def register_collector(self, collector):
            self.known = weakref.ref(collector)

        def __call__(self, turn):
            return policy(turn)

    curious, env = Curious(), Counting()
    collector = collect(env, policy=curious)
    assert env.collector is collector is curious.known()


def test_a_collector_is_freed(collect):
    collector = LLMCollector(Counting(), policy=policy, dialog_turns_per_batch=4)
    next(iter(collector))
    gone = weakref.ref(collector)
    del collector
    gc.collect()
    assert gone() is None


def test_torchrls_profiler_runs(collect, tmp_path):
    collector = collect(total_dialog_turns=16)
    collector.enable_profile(save_path=tmp_path / "trace.json", num_rollouts=2, warmup_rollouts=1)
    list(collector)
    assert (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.parametrize("where", ["_increment_frames", "postproc", "post_collect_hook"])
@pytest.mark.usefixtures("default_signals")
def test_a_batch_that_ctrl_c_meets_after_its_turns_is_counted_and_lost(collect, where):
    interrupts = [signal.SIGINT]

    def once(batch):
        if interrupts:
            signal.raise_signal(interrupts.pop())
        return batch

    collector = collect()
    setattr(collector, where, once)
    iterator = iter(collector)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert seen(next(iterator)) == [[102, 200], [102, 103]]
    assert (list(iterator), collector._frames, collector._iter) == ([], 8, 1)


@pytest.mark.parametrize("pool", [False, True], ids=["env", "pool"])
@pytest.mark.parametrize("completed", [False, True])
def test_dialogs_are_whole_wherever_ctrl_c_breaks_a_turn_off(collect, completed, pool):
    """It comes at one line after the other of the loop, and the next batches are taken."""
    makers = [lambda n=n: Counting(1, n) for n in (2, 3)]
    for line in itertools.count(4, 17):
        env = AsyncEnvPool(makers, stack="lazy") if pool else Counting(2, 2)
        collector, left, rows = collect(env, yield_completed_trajectories=completed), [line], []

        def interrupt(frame, event, _, left=left):
            if not frame.f_code.co_filename.endswith(("turns.py", "batches.py")):
                return None
            # In these two a batch that was taken may be lost.
            if event == "line" and frame.f_code.co_name not in ("take", "batch"):
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt
            return interrupt

        for _ in range(3):
            sys.settrace(interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                rows += collector._collect().reshape(-1).unbind(0)
            sys.settrace(None)
        begun: dict[int, int] = {}
        for count, n in sorted((row["seen"].item(), row[IDS].item()) for row in rows):
            begun[n] = begun.get(n, -1) + 1
            assert count % 100 == begun[n]
        collector.shutdown()
        if left[0] > 0:
            break


def stop(*_: Any) -> Any:
    raise StopIteration


class Exhausted(Counting):
    """One whose prompts end."""

    _step = stop


class Full:
    """A buffer that takes nothing."""

    extend = stop


FAILURES: dict[str, Any] = {
    "step": {"env": Exhausted()},
    "policy": {"policy": stop},
    "postproc": {"postproc": stop},
    "buffer": {"replay_buffer": Full()},
    "pool": {"env": AsyncEnvPool([lambda: Exhausted(1)] * 2, stack="lazy")},
}


@pytest.mark.parametrize("where", FAILURES)
def test_what_a_part_raises_is_no_end_of_the_batches(collect, where):
    iterator = iter(collect(**FAILURES[where]))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(iterator)
    with pytest.raises(RuntimeError, match="got one that was shut down"):
        list(iterator)


CALLS: dict[str, Callable[[Any], Any]] = {
    "shutdown": lambda collector: collector.shutdown(),
    "next": lambda collector: collector.next(),
    "start": lambda collector: collector.start(),
    "update": lambda collector: collector.update_policy_weights_(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_ends_the_thread_is_logged_and_raised_by_the_next_call(collect, caplog, call):
    collector = collect(replay_buffer=Full())
    collector.start()
    collector._stream.join(60)
    assert not collector.is_running()
    assert caplog.text.count("collecting in the background failed") == 1
    with pytest.raises(RuntimeError, match="StopIteration"):
        CALLS[call](collector)
    collector.async_shutdown()  # it is raised once


def test_next_goes_on_after_an_interrupt(collect):
    """The iterator of torchrl's has ended then."""
    calls = []

    def interrupted(turn):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return policy(turn)

    collector = collect(policy=interrupted)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    assert [seen(collector.next())[0] for _ in range(2)] == [[100, 101], [102, 200]]
    assert collector.next() is None
