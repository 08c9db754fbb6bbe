"""Lets transforms in a pool's environments score with the version of their turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torchrl.envs.llm.transforms import RetrieveKL as TorchrlRetrieveKL

from fusedrl.channel import Lease
from fusedrl.channel.following import Follower, Following
from fusedrl.channel.loading import Target
from fusedrl.collectors.versions import Versions
from fusedrl.weights.follow import patch_attribute
from fusedrl.weights.policy_copies import copied_for

CLOSE_S = 10.0  # seconds in which environments have to end the steps that use held weights


class PoolScoring:
    """Lets transforms of a pool's environments score with the version of their turn.

    While an environment steps, the policy is called for others, with newer weights. If a transform
    takes the policy from its collector, each turn therefore holds its version until its environment
    has stepped, and a second model computes with that version, for one environment at a time.

    Args:
        pool: a pool of threads; environments of other pools cannot reach the policy.
        versions: the versions of the policy's weights.

    Attributes:
        policy: the policy to score with; ``None`` if it is the collector's own.
    """

    def __init__(self, pool: Any, versions: Versions) -> None:
        self._envs: list[Any] = list(getattr(pool, "envs", ()))
        self._versions = versions
        self._is_needed = any(
            getattr(part, "takes_policy", False) for env in self._envs for part in env.modules()
        )
        self.policy: Any = None
        self._model: _SecondModel | None = None
        self._checked: Following | None = None
        self._turns: dict[int, Lease | None] = {}  # by environment
        self._stepping = threading.local()  # the turn of the environment that a thread steps
        self._undo: list[Callable[[], None]] = []

    def prepare(self, policy: Any) -> None:
        """Make the second model, if one is needed and there is none yet.

        Raises:
            ValueError: an environment computes with the policy's own weights.
            TypeError: the policy cannot be copied.
            TimeoutError: the channel's first version is not published in time.
        """
        follower = self._versions.follower
        if follower is None or follower is self._checked or self._model is not None:
            return
        self._refuse_shared(follower)
        self._checked = follower
        if not self._is_needed:
            return
        if not isinstance(follower, Follower):
            raise ValueError(
                "env: expected environments of a pool that leave a policy with a vLLM engine "
                "alone, which has one version at a time, got some that score with it; score with a "
                "model of its own, or outside of a pool"
            )
        follower.load()  # the weights that the policy began with have no version
        self._model = _SecondModel(policy, follower)
        self.policy = self._model.policy
        for index, env in enumerate(self._envs):
            step = partial(self._step, index, env.step_and_maybe_reset)
            self._undo.append(patch_attribute(env, "step_and_maybe_reset", step))

    def _refuse_shared(self, follower: Following) -> None:
        own = {id(parameter) for parameter in follower.module.parameters()}
        for part in (part for env in self._envs for part in env.modules()):
            waits = isinstance(part, TorchrlRetrieveKL) and not part._initialized
            if waits or any(id(parameter) in own for parameter in part.parameters(recurse=False)):
                raise ValueError(
                    f"env: expected environments of a pool that leave the policy's weights alone, "
                    f"which change while they step, got a {type(part).__name__} with these; score "
                    "with fusedrl.RetrieveKL('from_collector'), or with a model of its own"
                )

    @contextmanager
    def turns_of(self, indices: list[int]) -> Iterator[None]:
        """Hold the policy's version for the environments that get their turns in this block."""
        if self._model is None:
            yield
            return
        if self._versions.follower is not self._model.follower:
            raise RuntimeError(
                "policy: expected weights through the channel that environments score with, got "
                "another way; make another collector"
            )
        for index in indices:
            self._turns[index] = self._model.follower.hold()
        try:
            yield
        except BaseException:
            for index in indices:
                self._release(index)
            raise

    def _step(self, index: int, step: Callable[[Any], Any], tensordict: Any) -> Any:
        """Run an environment's step, in its thread."""
        self._stepping.index = index
        try:
            return step(tensordict)
        finally:
            del self._stepping.index
            self._release(index)

    def _release(self, index: int) -> None:
        held = self._turns.pop(index, None)
        if held is not None:
            held.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let :attr:`policy` compute with the version of the turn that this thread steps."""
        if self._model is None:
            with self._versions.held():
                yield
            return
        held = self._turns.get(getattr(self._stepping, "index", -1))
        if held is None:
            raise RuntimeError(
                "env: expected a transform that takes the policy from its collector to score in "
                "the thread of its environment's step, got another thread; call the policy within "
                "that step"
            )
        with self._model.computing_with(held):
            yield

    def close(self) -> None:
        """Wait until the environments have stepped, then restore them and release all versions."""
        deadline = time.monotonic() + CLOSE_S
        while self._turns and time.monotonic() < deadline:
            time.sleep(0.005)
        while self._undo:
            self._undo.pop()()
        for index in list(self._turns):
            self._release(index)


class _SecondModel:
    """A copy of a policy that computes with a version which is held.

    Args:
        policy: the policy to copy, without the weights that the follower loads.
        follower: the follower of the policy, or of a module in it.
    """

    def __init__(self, policy: Any, follower: Follower) -> None:
        layout = follower.reader.layout
        self.policy, module = copied_for(
            (policy, follower.module), follower.module, layout, memory=follower.mode == "copy"
        )
        self.follower = follower
        self._target = Target(module, layout)
        self._version: int | None = None
        self._lock = threading.Lock()

    @contextmanager
    def computing_with(self, held: Lease) -> Iterator[None]:
        """Load a version for this block, which one thread at a time can enter."""
        with self._lock:
            if self._version != held.version:
                self._version = None  # until the whole version is loaded
                held.load(self._target, self.follower.mode)
                self._version = held.version
            yield
