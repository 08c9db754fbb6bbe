"""Drop-in replacement for torchrl's ``LLMCollector``."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, Collector
from torchrl.collectors.llm.base import LLMCollector as _LLMCollector
from torchrl.envs import AsyncEnvPool, EnvBase

from fusedrl.channel.follow import Follower
from fusedrl.collectors.batches import QueueBuffer
from fusedrl.collectors.options import DialogOptions, check_state
from fusedrl.collectors.policy_version import tracked
from fusedrl.collectors.pool_turns import PoolLoop
from fusedrl.collectors.stream import SHUT_DOWN, Batches, Stream, finished
from fusedrl.collectors.turns import TurnLoop
from fusedrl.collectors.versions import Versions
from fusedrl.compat.torchrl import policy_with_state, receives_by_schemes
from fusedrl.weights.collector import POLICY_STATE, follow_policy
from fusedrl.weights.sync_scheme import of_policy
from fusedrl.weights.updaters import write_weights


class LLMCollector(_LLMCollector):
    """Collects dialogs in batches of turns, of shape (dialogs, time) or (turns,).

    A subclass of torchrl's class that accepts the same arguments. Each turn has the ID of its
    trajectory (``("collector", "traj_ids")``) and, with version tracking, the version of the policy
    that generated it (``"policy_version"``, also in ``"next"``). Batches are flat by default with a
    ``replay_buffer`` or a ``queue``.

    Args:
        weight_sync_schemes: dict from model name to scheme, instead of a ``weight_updater``.
        channel: reader or handle of the weight channel of the policy. Each turn, from the call of
            the policy to the last transform of ``env``, uses the version that is newest when it
            begins; before the first publish, the policy's initial weights, as version 0.
        channel_mode: ``"alias"`` or ``"copy"``, as for :meth:`fusedrl.WeightReader.load_into`.
        track_policy_version: whether to tag turns with the policy version, or the
            :class:`PolicyVersion` that tags them. It is appended to the environment if needed.
        max_staleness: drop batches whose oldest turn is more than this number of versions behind
            the newest one; ``stale_turns`` counts the dropped turns.
        queue: receives single turns, instead of a ``replay_buffer``; if full, drops the oldest.
        verbose: log turns, tokens, version and staleness of each batch.

    Raises:
        TypeError: arguments are missing or mutually exclusive.
        ValueError: a value is out of range, or the environment has an unsupported batch size.
        RuntimeError: ``async_envs`` without an ``AsyncEnvPool``.

    Example:
        >>> import torch
        >>> from torchrl.envs import SerialEnv
        >>> from torchrl.testing.mocking_classes import CountingEnv
        >>> from fusedrl import LLMCollector
        >>> collector = LLMCollector(
        ...     SerialEnv(2, lambda: CountingEnv(max_steps=2)),
        ...     policy=lambda turn: turn.set("action", torch.ones(2, 1, dtype=torch.int32)),
        ...     dialog_turns_per_batch=4,
        ...     total_dialog_turns=8,
        ...     track_policy_version=True,
        ... )
        >>> for batch in collector:
        ...     print(tuple(batch.shape), batch["policy_version"].unique().item())
        ...     collector.increment_version()
        (2, 2) 0
        (2, 2) 1
    """

    closed = True  # until the constructor has succeeded
    _ends = False  # whether to stop before the next turn

    def __init__(self, env: Any, **arguments: Any) -> None:
        options = DialogOptions(env, **arguments)
        self._stream, self._versions = Stream(self), Versions()
        env = options.env if isinstance(options.env, EnvBase) else options.env()
        self.async_envs = isinstance(env, AsyncEnvPool)
        self._loop = (PoolLoop if self.async_envs else TurnLoop)(env, options, self._versions)
        policy = options.policy if options.policy_factory is None else options.policy_factory()
        self.yield_only_last_steps = bool(options.yield_only_last_steps)
        self.yield_completed_trajectories, self.flatten_data = options.completed, options.flat
        self.verbose, self.max_staleness = options.verbose, options.max_staleness
        buffer: Any = options.replay_buffer if options.queue is None else QueueBuffer(options.queue)
        with ExitStack() as undo:
            undo.callback(self._versions.leave)
            if (channel := options.channel) is not None:
                self._versions.follow(*follow_policy(channel, policy, options.channel_mode))
            env, self._versions.tracker = tracked(env, options.track_policy_version)
            self._loop.env = env
            # torchrl's LLMCollector.__init__ has no weight_sync_schemes.
            Collector.__init__(
                self,
                env,
                policy,
                frames_per_batch=options.dialog_turns_per_batch or 1,
                total_frames=options.total_dialog_turns,  # pyright: ignore[reportArgumentType]
                replay_buffer=buffer,
                weight_updater=options.weight_updater,
                weight_sync_schemes=options.weight_sync_schemes,
                reset_at_each_iter=options.reset_at_each_iter,
                postproc=options.postproc,
                trust_policy=True,
                use_buffers=False,
                no_cuda_sync=True,
                traj_pool=self._loop.trajectories,
                # True would add an InitTracker, which language models do not use, or warn.
                auto_register_policy_transforms=False,
            )
            undo.pop_all()
        for inner in getattr(env, "envs", ()) if self.async_envs else ():
            inner.register_collector(self)  # processes cannot reference the collector

    __init__.__signature__ = inspect.signature(DialogOptions.__init__)  # pyright: ignore[reportFunctionMemberAccess]

    # Hooks of torchrl's constructor and methods.

    def __bool__(self) -> bool:
        """Always true: Ray calls it on actors, where torchrl's ``__len__`` may be infinite."""
        return True

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        self.policy_version_tracker = self._versions.tracker

    def _make_carrier(self) -> None:
        # torchrl resets here and again at the first rollout: a batch of prompts would be lost.
        self._carrier = TensorDict()

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        """Skip torchrl's trial rollout: it would generate answers only to find the output keys."""

    @property
    def _frames(self) -> int:
        return self._loop.frames

    @_frames.setter
    def _frames(self, frames: int) -> None:
        self._loop.frames = frames

    @property
    def policy(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The policy; read-only if its weights come from a channel."""
        return self._policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        followed = self._versions.follower is not None and "_policy" in vars(self)
        if followed and policy is not self._policy:
            raise RuntimeError(
                "policy: expected the module that follows the channel, got another one; publish "
                "the new weights, or make another collector"
            )
        self._policy = policy

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        # torchrl calls this without an updater or scheme; its method accepts tensordicts only.
        if policy_or_weights is None or model_id not in (None, "policy"):
            super()._maybe_fallback_update(policy_or_weights, model_id=model_id)
        else:
            write_weights(self.policy, policy_or_weights)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        with self._versions.update(numbered=model_version is not None):
            super()._receive_weights_scheme(model_version=model_version)

    # Batches.

    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches; any error except Ctrl-C shuts the collector down."""
        return Batches(super().__iter__)

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_dialog_turns``, or ``None`` for each one sent to a buffer."""
        while taken := self._stream.take():
            yield taken.pop()  # a frame that waits keeps no batch

    def _next_batch(self) -> TensorDictBase | None:
        self._require_open()
        if self._frames >= self.total_frames:
            return None
        batch = self._collect()
        self._iter += 1
        self._increment_frames(0)  # already counted; closes the environment after the last batch
        return batch

    def _prefetch_next(self) -> None:
        """Do nothing: turns run on demand."""

    def _postproc(self, batch: Any) -> Any:
        batch = finished(batch, self.postproc)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def start(self) -> None:
        """Fill the buffer from a thread until shutdown; its errors are raised by the next call."""
        self._require_open()
        self._stream.start(self.iterator)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._stream.is_running()

    def rollout(self) -> TensorDictBase:
        """Collect one batch, which is not counted and not postprocessed."""
        batch = self._collect()
        self._frames -= batch.numel()
        return batch

    @torch.no_grad()
    def _collect(self) -> TensorDictBase:
        """The next batch; after Ctrl-C the next call returns it, or it is already counted."""
        self._require_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.reset_at_each_iter:
            self._loop.restart()
        with self._stream.taking:
            return self._loop.batch(self.policy, self._require_open)

    def _require_open(self) -> None:
        self._stream.check()
        if self.closed or self._ends:
            raise RuntimeError(SHUT_DOWN)

    @property
    def stale_turns(self) -> int:
        """Number of turns dropped because of ``max_staleness``."""
        return self._stream.dropped

    # Weights and versions.

    @BaseCollector.weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        set_updater: Any = BaseCollector.weight_updater.fset
        set_updater(self, value)
        for name in ("push_weights", "update_weights"):  # torchrl's name, fusedrl's name
            if hasattr(self._weight_updater, name):  # one version for each update, whoever calls it
                update = getattr(self._weight_updater, name)
                setattr(self._weight_updater, name, self._versions.update()(update))

    @property
    def policy_version(self) -> Any:
        """The version of the next turn; ``None`` if versions are not tracked."""
        return self._versions.newest

    def increment_version(self) -> None:
        """Increment the policy version, at most once for each update."""
        self._versions.count()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the policy's weights between two turns, and count one version.

        It waits for a turn that runs in another thread. With ``channel=`` it does nothing.

        Raises:
            ValueError: names or shapes do not match the policy's; no weight is changed.
            RuntimeError: called within a turn, or there is no module, updater or scheme to update.
            TimeoutError: the turn does not end within 10 minutes.
        """
        self._stream.check()
        if self._versions.close is not None and not args and not kwargs:
            return
        if kwargs.get("weights_dict") is not None and not self._weight_sync_schemes:
            raise ValueError(
                "weights_dict: expected None without weight_sync_schemes, got weights; pass the "
                "policy's weights as the first argument"
            )
        with self._versions.update():
            super().update_policy_weights_(*args, **kwargs)

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """As :meth:`update_policy_weights_`, also from the receiving schemes."""
        has_schemes = receives_by_schemes(self)
        named = [each for each in (policy_or_weights, weights, policy) if each is not None]
        with self._versions.update() if named or has_schemes else nullcontext():
            if len(named) == 1 and not has_schemes:
                write_weights(self.policy, named[0])
            else:
                receive: Any = super().receive_weights
                receive(policy_or_weights, weights=weights, policy=policy)

    def follow(self, follower: Follower) -> Callable[[bool], None]:
        """Run each turn with one version of ``follower`` until the returned function is called."""
        return self._versions.follow(follower)

    def scoring(self) -> AbstractContextManager[Any]:
        """Context in which a transform of ``env`` uses the version of the current turn."""
        # In a pool, updates already wait for the environments.
        return nullcontext() if self.async_envs else self._versions.call()

    # State and shutdown.

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Restart all dialogs at the next rollout, and discard the turns collected so far."""
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environment; call reset() without it"
            )
        with self._stream.taking:  # not in the middle of a turn
            self._loop.restart(finished=True)

    def state_dict(self) -> Any:
        """State of environment, policy, counts and version; later rollouts do not change it."""
        self._require_open()
        state = super().state_dict()
        if self._versions.follower is not None and POLICY_STATE in state:
            state[POLICY_STATE] = copy.deepcopy(self.policy.state_dict())  # slots are reused
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore the result of :meth:`state_dict` and restart the dialogs.

        A policy that follows a channel keeps its weights and version, unless a scheme in the
        trainer's process owns the channel: it publishes the restored weights under their version or
        a greater one. ``strict=False`` accepts a state without policy or environment.

        Raises:
            KeyError, TypeError, ValueError: the state does not match; nothing is changed.
        """
        self._require_open()
        own, given, follower = (
            super().state_dict(),
            OrderedDict(state_dict),
            self._versions.follower,
        )
        loads = policy_with_state(self)  # the trainer's module, if a scheme copied it
        # Weights from a channel are in read-only memory.
        brought = loads is self.policy and follower is not None and follower.version is not None
        if brought or loads is None:
            for state in (own, given):
                state.pop(POLICY_STATE, None)
        check_state(own, given, kwargs.get("strict", True))
        self.reset()
        with nullcontext() if follower is not None else self._versions.update(numbered=True):
            super().load_state_dict(given, **(kwargs | {"strict": False}))
        for scheme in of_policy(self._weight_sync_schemes):
            scheme.restore(None, given.get("policy_version"), loaded=POLICY_STATE in given)

    def shutdown(
        self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True
    ) -> None:
        """Stop the background thread, close the environment and stop following the channel.

        A rollout in another thread raises ``RuntimeError`` after its current turn. Errors of the
        environment and of the background thread are raised unless ``raise_on_error=False``.
        """
        stream = self._stream
        stream.stop()
        stream.join(timeout)
        if not stream.is_running():
            self._ends = True
            # An environment that is closed while it steps fails with unrelated errors.
            if stream.taking.acquire(timeout=-1 if timeout is None else timeout):
                stream.taking.release()
        try:
            super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            self._versions.leave()
        if raise_on_error:
            stream.check()

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()
