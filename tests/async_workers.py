"""What the workers of AsyncCollector's tests import: environments and policies that go wrong."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from counting_dialogs import Counting
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.envs import EnvBase, ParallelEnv
from torchrl.testing.mocking_classes import CountingEnv
from weights_workers import Ones


class Odd(Exception):
    """Its pickle cannot be read: it takes two arguments and keeps one."""

    def __init__(self, what: str, more: int) -> None:
        super().__init__(what)
        self.more = more


class Failing:
    """A policy that raises at its ``calls``-th call."""

    def __init__(self, error: BaseException, calls: int = 1) -> None:
        self.error = error
        self.left = calls

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.left -= 1
        if self.left <= 0:
            raise self.error
        return ones(tensordict)


class FailingEnv(CountingEnv):
    """An environment that raises in its third step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.count >= 2:
            raise ZeroDivisionError("the third step")
        return super()._step(tensordict)


class Slow(CountingEnv):
    """An environment that says when it steps, which takes long, and when it is closed."""

    def __init__(self, folder: str, seconds: float = 60.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.folder, self.seconds = Path(folder), seconds

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
            except BaseException:  # noqa: S112
                continue


def ones(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", torch.ones(*tensordict.shape, 1, dtype=torch.int32))


def no_env() -> EnvBase:
    raise ValueError("no environment today")


def no_policy() -> Any:
    raise LookupError("no policy today")


def exits(tensordict: TensorDictBase) -> TensorDictBase:
    os._exit(3)


def parallel() -> EnvBase:
    return ParallelEnv(2, CountingEnv)


class Own(ParallelEnv):
    """Two environments in processes of their own, whose pids it writes down."""

    def __init__(self, folder: str) -> None:
        super().__init__(2, CountingEnv)
        self.folder = Path(folder)

    def _reset(self, *args: Any, **kwargs: Any) -> TensorDictBase:
        answer = super()._reset(*args, **kwargs)
        pids = [str(os.getpid())] + [str(process.pid) for process in self._workers]
        temporary = self.folder / "pids.tmp"
        temporary.write_text(" ".join(pids))
        temporary.rename(self.folder / "pids")
        return answer


def linear() -> TensorDictModule:
    return TensorDictModule(torch.nn.Linear(1, 1), in_keys=["observation"], out_keys=["action"])


def counting_rows() -> EnvBase:
    return Counting()


__all__ = ["Ones"]
