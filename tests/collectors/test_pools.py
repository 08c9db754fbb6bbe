"""``AsyncEnvPool`` as an environment: what fails in it, and what it cannot be made of."""

from __future__ import annotations

import signal
import sys
import threading
import time
from concurrent.futures import _base

import pytest
from counting_dialogs import Counting
from tensordict import lazy_stack
from torchrl.envs import AsyncEnvPool

MODES = [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}]


class Failing(Counting):
    """Raises once, at a step or at a reset."""

    def __init__(self, at: str, number: int) -> None:
        super().__init__(1)
        self.at, self.number = at, number

    def _check(self, at: str, number: int) -> None:
        if (self.at, self.number) == (at, number):
            raise ValueError(f"in {at} {number}")

    def _step(self, tensordict):
        made = super()._step(tensordict)
        self._check("step", self.steps)
        return made

    def _reset(self, tensordict=None, **kwargs):
        made = super()._reset(tensordict)
        self._check("reset", self.resets)
        return made


class Slow(Counting):
    """Takes a while for each step."""

    def _step(self, tensordict):
        time.sleep(0.2)
        return super()._step(tensordict)


def interrupt_between_locks(frame, event, argument):
    """A tracer that sends Ctrl-C where ``wait()`` has taken the lock of one step of two."""
    if frame.f_code is not _base._AcquireFutures.__enter__.__code__:
        return None
    lines = iter(range(1, 5))

    def line(*_):
        if next(lines, 0) == 4:
            signal.raise_signal(signal.SIGINT)
        return line

    return line


def dialogs_of(batch):
    """Each dialog's observations, in order."""
    found = {}
    for row in batch.reshape(-1).unbind(0):
        found.setdefault(row["collector", "traj_ids"].item(), []).append(row["seen"].item())
    return found


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("at", "number"), [("step", 5), ("reset", 1), ("reset", 3)])
@pytest.mark.parametrize("begins_by", ["rollout", "reset"])
def test_new_dialogs_begin_after_an_error(collect, mode, at, number, begins_by):
    pool = AsyncEnvPool([lambda: Failing(at, number), lambda: Counting(1, 4)], stack="lazy")
    collector = collect(pool, total_dialog_turns=-1, **mode)
    with pytest.raises(ValueError, match=f"in {at} {number}"):
        lazy_stack([collector.rollout() for _ in range(20)])
    if begins_by == "reset":
        collector.reset()
    after = lazy_stack([row for _ in range(6) for row in collector.rollout().reshape(-1).unbind(0)])
    dialogs = dialogs_of(after)
    assert set(after["env_index"]) == {0, 1}
    for seen in dialogs.values():
        first = seen[0]
        assert first % 100 == 0 and seen == list(range(first, first + len(seen)))


@pytest.mark.parametrize("stack", ["lazy", "dense"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_environments_of_several_dialogs_are_refused(collect, stack, mode):
    """torchrl's pool steps one of them twice, and another never."""
    pool = AsyncEnvPool([lambda: Counting(2)] * 2, stack=stack)
    with pytest.raises(ValueError, match=r"env: .* one dialog each, got .*batch_size=\(2,\)"):
        collect(pool, **mode)


def test_ctrl_c_leaves_no_lock_that_a_step_needs(collect):
    pool = AsyncEnvPool([lambda: Slow(1, 4), lambda: Slow(1, 4)], stack="lazy")
    collector = collect(pool, total_dialog_turns=-1)
    collector.rollout()
    sys.settrace(interrupt_between_locks)
    try:
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
    finally:
        sys.settrace(None)
    assert dialogs_of(collector.rollout())


@pytest.mark.usefixtures("default_signals")
def test_ctrl_c_breaks_off_the_wait_for_a_reset(collect):
    begun, goes_on = threading.Event(), threading.Event()

    class Waiting(Counting):
        def _reset(self, *args, **kwargs):
            begun.set()
            assert goes_on.wait(20)
            return super()._reset(*args, **kwargs)

    collector = collect(AsyncEnvPool([lambda: Waiting(1)] * 2, stack="lazy"))
    threading.Thread(target=lambda: begun.wait(20) and signal.raise_signal(signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        collector.rollout()
    goes_on.set()
    assert dialogs_of(collector.rollout())
