"""What the workers of AsyncCollector's tests import: environments and policies that go wrong."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import termios
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvBase
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv, CountingEnv

from fusedrl import AsyncCollector
from fusedrl.collectors.process import async_collector


class Odd(Exception):
    """Its pickle cannot be read: it takes two arguments and keeps one."""

    def __init__(self, what: str, more: int) -> None:
        super().__init__(what)
        self.more = more


class Unspeakable(Exception):
    """Whatever it says of itself raises."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class Failing:
    """A policy that raises in its sixth call, or ends its process."""

    def __init__(self, error: Any = None, *args: Any) -> None:
        self.error, self.args = error, args
        self.left = 6

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.left -= 1
        if self.left <= 0 and self.error is None:
            os._exit(3)
        if self.left <= 0:
            raise self.error(*self.args)
        return ones(tensordict)


class Endless:
    """What nobody but its own process can unpickle before it is released."""

    def __reduce__(self) -> Any:
        return wait_elsewhere, (os.getpid(),)


released = threading.Event()


def wait_elsewhere(pid: int) -> None:
    if os.getpid() != pid:
        released.wait()


class FailingEnv(CountingEnv):
    """An environment that raises in its third step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.count >= 2:
            raise ZeroDivisionError("the third step")
        return super()._step(tensordict)


class Loading(CountingEnv):
    """An environment that can be sent things, and gives them back."""

    def __init__(self) -> None:
        super().__init__(max_steps=10**9)

    def load(self, thing: Any) -> Any:
        return thing


class Parent(CountingEnv):
    """One with a child that it has forked, which writes down its pid and closes nothing."""

    def __init__(self, folder: str) -> None:
        super().__init__(max_steps=10**9)
        child = os.fork()
        if not child:
            while True:
                time.sleep(60)
        (Path(folder) / "pids").write_text(f"{os.getpid()} {child}")


class Slow(CountingEnv):
    """An environment that says when it steps, which takes long, and when it is closed."""

    def __init__(self, folder: str, seconds: float = 60.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.seconds = Path(folder), seconds
        self.is_closed = False  # torchrl's environments with something to close say so

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        (self.folder / "steps").touch()
        time.sleep(self.seconds)
        return super()._step(tensordict)

    def close(self, **kwargs: Any) -> None:
        (self.folder / "closed").touch()
        super().close(**kwargs)


class Deaf(Slow):
    """One that catches what should end it."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        (self.folder / "steps").touch()
        while True:
            try:
                time.sleep(60)
            except BaseException:
                continue


def ones(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", torch.ones(*tensordict.shape, 1, dtype=torch.int32))


def no_env() -> EnvBase:
    raise ValueError("no environment today")


def no_policy() -> Any:
    raise LookupError("no policy today")


class WithProcesses(CountingEnv):
    """An environment with processes of its own, which writes down their pids and its own."""

    def __init__(self, folder: str) -> None:
        super().__init__(max_steps=1000)
        self.is_closed = False
        context = multiprocessing.get_context("spawn")
        self.processes = [context.Process(target=time.sleep, args=(1000,)) for _ in range(2)]
        for process in self.processes:
            process.daemon = True
            process.start()
        pids = [str(os.getpid())] + [str(process.pid) for process in self.processes]
        temporary = Path(folder) / "pids.tmp"
        temporary.write_text(" ".join(pids))
        temporary.rename(Path(folder) / "pids")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        time.sleep(0.01)
        return super()._step(tensordict)

    def close(self, **kwargs: Any) -> None:
        for process in self.processes:
            process.terminate()
        super().close(**kwargs)


def fork_workers() -> None:
    """Let the workers of this process be forks of it."""
    async_collector.process_context = lambda: multiprocessing.get_context("fork")


class AtTerminal(CountingEnv):
    """One that changes the settings of the terminal, and tries to read from it."""

    def __init__(self, folder: str) -> None:
        super().__init__(max_steps=1000)
        with open("/dev/tty") as terminal:  # noqa: PTH123
            termios.tcsetattr(terminal, termios.TCSANOW, termios.tcgetattr(terminal))
            with contextlib.suppress(OSError):
                terminal.read()


def collect_in_a_script(folder: str, batches: int, env: Any = WithProcesses) -> None:
    """What a script does that leaves everything else to the end of its interpreter."""
    collector = AsyncCollector(partial(env, folder), ones, frames_per_batch=10)
    for _, _ in zip(range(batches), collector, strict=False):
        (Path(folder) / "collecting").touch()


def collect_beside_a_fork(folder: str) -> None:
    """A script with a child that holds its ends of all pipes open."""
    collector = AsyncCollector(partial(Parent, folder), ones, frames_per_batch=10)
    if not os.fork():
        while True:
            time.sleep(60)
    while True:
        collector.next()
        (Path(folder) / "collecting").touch()


def linear() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(7, 7), in_keys=["observation"], out_keys=["action"])


def with_truncation(**kwargs: Any) -> EnvBase:
    env = CountingEnv(**kwargs)
    env.add_truncated_keys()
    return env


def seeded_vec_env() -> EnvBase:
    return ContinuousActionVecMockEnv()
