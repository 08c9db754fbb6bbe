"""Lets transforms in a pool's environments score with the version of their turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

from torch import nn

from fusedrl.channel import Lease
from fusedrl.channel.following import Follower, Following
from fusedrl.channel.loading import Target
from fusedrl.collectors.versions import Versions
from fusedrl.compat.torchrl import steps_have_ended, will_take_policy
from fusedrl.weights.follow import patch_attribute
from fusedrl.weights.policy_copies import copied_for

CLOSE_S = 10.0  # seconds in which environments have to end the steps that use held weights


class PoolScoring:
    """Lets transforms of a pool's environments score with the version of their turn.

    While an environment steps, the policy is called for others. If a transform takes the policy
    from its collector, the version of each turn lasts until its environment has stepped. Without a
    channel, updates wait for that. Through a channel, the others may have newer versions: each turn
    has a lease, and a second model computes with its version, for one environment at a time.

    Args:
        pool: a pool of threads; environments of other pools cannot reach the policy.
        versions: the versions of the policy's weights.

    Attributes:
        policy: the policy to score with; ``None`` if it is the collector's own.
    """

    def __init__(self, pool: Any, versions: Versions) -> None:
        self._pool, self._versions = pool, versions
        self._envs: list[Any] = list(getattr(pool, "envs", ()))
        self._scores = any(
            getattr(part, "takes_policy", False) for env in self._envs for part in env.modules()
        )
        self.policy: Any = None
        self._model: _SecondModel | None = None
        self._checked: tuple[Any, Any] = (None, None)  # the follower and the policy
        self._leases: dict[int, Lease | None] = {}  # by environment
        self._stepping = threading.local()  # the environment that a thread steps
        self._undo: list[Callable[[], None]] = []

    def prepare(self, policy: Any) -> None:
        """Let versions last until environments have stepped that compute with the policy.

        Weights from a channel need a second model for that, which is made here.

        Raises:
            ValueError: an environment computes with the policy's own weights, which come from a
                channel.
            TypeError: the policy cannot be copied.
            TimeoutError: the channel's first version is not published in time.
        """
        follower = self._versions.follower
        if all(map(is_, self._checked, (follower, policy))):
            return
        shared = self._sharing(policy if follower is None else follower.module)
        if follower is None and (self._scores or shared):
            self._versions.settle = partial(steps_have_ended, self._pool)
        elif follower is not None and self._model is None:
            self._make_model(follower, policy, shared)
        self._checked = follower, policy

    def _sharing(self, policy: Any) -> list[Any]:
        """The parts of environments that compute with the policy's own parameters."""
        own = {
            id(parameter)
            for module in (policy, getattr(policy, "model", None))
            if isinstance(module, nn.Module)
            for parameter in module.parameters()
        }
        return [
            part
            for env in self._envs
            for part in env.modules()
            if will_take_policy(part)
            or any(id(parameter) in own for parameter in part.parameters(recurse=False))
        ]

    def _make_model(self, follower: Following, policy: Any, shared: list[Any]) -> None:
        if shared:
            raise ValueError(
                f"env: expected environments of a pool that leave the policy's weights alone, "
                f"which change while they step, got a {type(shared[0]).__name__} with these; score "
                "with fusedrl.RetrieveKL('from_collector'), or with a model of its own"
            )
        if not self._scores:
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

    @contextmanager
    def turns_of(self, indices: list[int]) -> Iterator[None]:
        """Lease the policy's version for the environments that get their turns in this block."""
        model = self._model
        if model is not None and self._versions.follower is not model.follower:
            raise RuntimeError(
                "policy: expected weights through the channel that environments score with, got "
                "another way; make another collector"
            )
        try:
            if model is not None:
                self._leases.update((index, model.follower.hold()) for index in indices)
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
        lease = self._leases.pop(index, None)
        if lease is not None:
            lease.release()

    def held(self) -> AbstractContextManager[Any]:
        """Let :attr:`policy` compute with the version of the turn that this thread steps."""
        if self._model is None:
            # Without a channel, updates wait for the environments.
            return nullcontext() if self._versions.follower is None else self._versions.held()
        lease = self._leases.get(getattr(self._stepping, "index", -1))
        if lease is None:
            raise RuntimeError(
                "env: expected a transform that takes the policy from its collector to score in "
                "the thread of its environment's step, got another thread; call the policy within "
                "that step"
            )
        return self._model.computing_with(lease)

    def close(self) -> None:
        """Wait until the environments have stepped, then restore them and release all versions."""
        if self._leases:
            steps_have_ended(self._pool, CLOSE_S)
        while self._undo:
            self._undo.pop()()
        for index in list(self._leases):
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
    def computing_with(self, lease: Lease) -> Iterator[None]:
        """Load a version for this block, which one thread at a time can enter."""
        with self._lock:
            if self._version != lease.version:
                self._version = None  # until the whole version is loaded
                lease.load(self._target, self.follower.mode)
                self._version = lease.version
            yield
