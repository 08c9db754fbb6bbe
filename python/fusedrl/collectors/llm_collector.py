"""torchrl's ``LLMCollector``: dialogs between a policy and an environment, in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import AsyncEnvPool, EnvBase

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.arguments import check_arguments, check_environment
from fusedrl.collectors.dialogs import Dialogs, FlatTurns, Turns
from fusedrl.collectors.from_channel import FromChannel
from fusedrl.collectors.policy_version import KEY, PolicyVersion
from fusedrl.collectors.progress import check_progress
from fusedrl.collectors.queues import QueueBuffer
from fusedrl.collectors.reuse import Reuse
from fusedrl.collectors.state import check_state
from fusedrl.collectors.stopwatch import Profile, Stopwatch
from fusedrl.collectors.updates import Update, Updates


class LLMCollector(Updates):
    """Collect dialogs: iterate to get batches of turns, of shape (dialogs, time) or (turns,).

    Takes the place of torchrl's class, and is one for ``isinstance``. Turns carry the trajectory
    that they belong to (``("collector", "traj_ids")``) and, if versions are tracked, the version
    that the policy had when it was called for the turn (``"policy_version"``, also in ``"next"``).

    Args:
        env: an environment, or a function that makes one.
        policy: takes and returns a tensordict; a new one each turn, or the one it was given. What
            it or ``env`` returns again within the first three turns is copied at each turn; memory
            that is used again only later must be cloned by its owner.
        policy_factory: makes the policy, in its place.
        dialog_turns_per_batch: turns in a batch, rounded up to whole steps of the environment. May
            be left out for completed trajectories.
        yield_only_last_steps: the last turn of each completed trajectory only; the others count
            towards ``total_dialog_turns`` still.
        yield_completed_trajectories: batches of completed trajectories, one after the other, that
            have ``dialog_turns_per_batch`` turns or more; from an ``AsyncEnvPool`` each trajectory
            as soon as it is complete. By default as ``yield_only_last_steps``.
        postproc: is given each batch, and returns what is to be yielded or stored.
        total_dialog_turns: turns to run in all; -1 never ends.
        async_envs: ``True`` asserts that ``env`` is an ``AsyncEnvPool``, which is seen anyway.
        replay_buffer: is extended with each batch; the iterator yields ``None`` instead.
        reset_at_each_iter: start new dialogs for each batch, whatever running ones had.
        flatten_data: one dimension, dialog after dialog, instead of (dialogs, time). By default
            when a ``replay_buffer`` or a ``queue`` is given.
        weight_updater: torchrl's or ours (or a function that makes it), registered with this.
        weight_sync_schemes: torchrl's schemes by the name of their model, instead of an updater.
        queue: takes single turns in the place of a ``replay_buffer``; drops its oldest if full.
        channel: where the policy's weights come from: each call of the policy is with the newest
            version, whose number is the policy's version; before the first with what the policy
            has, as version 0. A handle is opened, and closed at shutdown.
        channel_mode: ``"alias"`` or ``"copy"``, as of :meth:`fusedrl.WeightReader.load_into`.
        track_policy_version: whether to tag turns, or with which :class:`PolicyVersion`. Added to
            the environment unless it is there; an ``AsyncEnvPool`` needs none.
        max_staleness: drop a batch if its oldest turn is more than so many versions behind the
            policy's, or the channel's; ``stale_turns`` counts what is dropped.
        progress: show a progress bar, with rich: turns, tokens, version, staleness.
        verbose: log the same for each batch, unless there is a bar.

    Raises:
        TypeError: arguments that exclude each other, or one that is missing.
        ValueError: numbers out of range; an environment without the one batch dimension that
            completed trajectories take.
        RuntimeError: ``async_envs`` without an ``AsyncEnvPool``; a queue and a replay buffer; a
            policy that returns one tensordict twice; weights that are given to a collector with a
            channel.

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
        ...     print(tuple(batch.shape), batch["observation"].squeeze(-1).tolist())
        ...     collector.increment_version()
        (2, 2) [[0, 1], [0, 1]]
        (2, 2) [[2, 0], [2, 0]]
        >>> batch["policy_version"].tolist()
        [[1, 1], [1, 1]]
    """

    def __init__(
        self,
        env: Any,
        *,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        policy_factory: Callable[[], Callable[[TensorDictBase], TensorDictBase]] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Callable[[TensorDictBase], TensorDictBase] | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Any | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: Any | None = None,
        weight_sync_schemes: dict[str, Any] | None = None,
        queue: Any | None = None,
        channel: WeightHandle | WeightReader | None = None,
        channel_mode: str = "alias",
        track_policy_version: bool | PolicyVersion = False,
        max_staleness: int | None = None,
        progress: bool = False,
        verbose: bool = False,
    ) -> None:
        self.closed = True
        check_arguments(locals())
        check_progress(progress)
        env = env if isinstance(env, EnvBase) else env()
        self.yield_only_last_steps = bool(yield_only_last_steps)
        self.yield_completed_trajectories = bool(
            yield_completed_trajectories or yield_only_last_steps
        )
        check_environment(env, async_envs, self.yield_completed_trajectories)
        self._pool = self.async_envs = isinstance(env, AsyncEnvPool)
        self._update, self._watch = Update(), Stopwatch()
        self._counting = threading.Lock()  # held while a version is counted
        renew_in_children(self, _counting=threading.Lock)
        self._channel = None
        policy = policy if policy_factory is None else policy_factory()
        opened = None if channel is None else FromChannel(channel, policy, channel_mode)
        env, self._tracker = self._tracked(env, track_policy_version)
        replay_buffer = replay_buffer if queue is None else QueueBuffer(queue)
        # Past torchrl's own constructor, which has no weight_sync_schemes and runs what follows.
        Collector.__init__(
            self,
            env,
            policy,
            frames_per_batch=dialog_turns_per_batch or 1,
            total_frames=total_dialog_turns,
            replay_buffer=replay_buffer,
            weight_updater=weight_updater,
            weight_sync_schemes=weight_sync_schemes,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            trust_policy=True,
            use_buffers=False,
            no_cuda_sync=True,
            # That would add an InitTracker, which no language model reads, and otherwise warns.
            auto_register_policy_transforms=False,
        )
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self.max_staleness, self.stale_turns = max_staleness, 0
        self.progress, self.verbose = progress, verbose
        self._running, self._reuse = False, Reuse()
        self._carried, self._asked, self._held = None, {}, {}
        wanted = self.requested_frames_per_batch
        self._batches = (
            Dialogs(env.batch_size[0], 1 if self._pool else wanted, self.yield_only_last_steps)
            if self.yield_completed_trajectories
            else (FlatTurns if self.flatten_data else Turns)(wanted)
        )
        self._channel = opened
        for inner in getattr(env, "envs", ()) if self._pool else ():
            inner.register_collector(self)  # a pool of threads; processes cannot know it

    def _tracked(self, env: Any, track: bool | PolicyVersion) -> tuple[Any, Any]:
        """The environment with the tracker, and the tracker."""
        if track is False:
            return env, None
        tracker = PolicyVersion() if track is True else track
        if not self._pool and tracker.container is None:
            env = env.append_transform(tracker)
        if not self._pool and KEY not in list(env.observation_spec):
            raise ValueError(
                "track_policy_version: expected a tracker that is in env or in none, got one of "
                "another environment; make a PolicyVersion for each"
            )
        return env, tracker

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        # torchrl asks before it connects schemes, which may need the tracker, or replace it.
        self.policy_version_tracker = self._tracker

    def _make_carrier(self) -> None:
        # torchrl resets here and once more at the first rollout: a batch of prompts would be lost.
        self._carrier = TensorDict()

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        # torchrl calls the policy here, to know its keys; an LLM would answer the lost prompts.
        if make_rollout:
            super()._maybe_make_final_rollout(make_rollout)

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of a collector that has none.

        Raises:
            RuntimeError: it has one.
        """
        if self.postproc is not None:
            raise RuntimeError(
                f"postproc: expected a collector without one, got {self.postproc!r}; assign "
                "collector.postproc to replace it"
            )
        self.postproc = postproc

    def get_policy_model(self) -> Any:
        """The model that the policy wraps."""
        try:
            return self.policy.model
        except AttributeError as error:
            raise AttributeError(
                f"policy: expected a wrapper with a model, got {type(self.policy).__name__}; "
                "use collector.policy"
            ) from error

    @classmethod
    def as_remote(cls, remote_config: dict[str, Any] | None = None) -> Any:
        """The class of actors that are such a collector.

        Args:
            remote_config: Ray's options for them.
        """
        # Ray takes no empty options, which torchrl gives it.
        return super().as_remote(remote_config or {"max_concurrency": 1})

    def is_initialized(self) -> bool:
        """Whether the collector is ready: made, and not shut down."""
        return not self.closed

    def next(self) -> TensorDictBase | None:
        """The next batch without its device, or ``None`` at the end."""
        if self._iterator is None:
            self._iterator = iter(self)
        batch = next(self._iterator, None)
        return batch if batch is None or batch.device is None else batch.clear_device_()

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment; returns the seed that follows.

        Raises:
            RuntimeError: the collector is shut down.
        """
        self._require_open()
        return super().set_seed(seed, static_seed=static_seed)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs at the next rollout; nothing of before is in any batch.

        Raises:
            NotImplementedError: an ``index``.
        """
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environment; all dialogs start anew"
            )
        self._interrupt()
        self._frames += self._batches.clear()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End a thread that was started, close the environment, and let the channel go.

        Args:
            timeout: seconds to wait for the thread.
            close_env: whether to close the environment, too.
            raise_on_error: whether to raise what closing raises.
        """
        try:
            super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            if self._channel is not None:
                self._channel.close()

    def profile(self) -> Profile:
        """Where the time went since the collector was made: policy, env, stamping, queueing."""
        return self._watch.profile()

    def state_dict(self) -> Any:
        """Environment, policy, counts and version, which later rollouts do not change."""
        self._require_open()
        state = super().state_dict()
        weights = state.get("policy_state_dict", {})
        for name, value in weights.items() if self._channel is not None else ():
            weights[name] = value.clone() if isinstance(value, Tensor) else value
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore environment, policy, counts and version; dialogs start anew.

        Once there are weights of a channel, the policy keeps these and their version.

        Args:
            state_dict: as :meth:`state_dict` returns it.
            kwargs: ``strict=False`` takes a state without the policy's or the environment's.

        Raises:
            ValueError: entries that are missing, or that do not fit; nothing has changed then.
            RuntimeError: the collector is shut down.
        """
        strict = kwargs.get("strict", True)
        state_dict, owners = self._checked_state(state_dict, strict)
        self._interrupt()
        self._batches.clear()
        if "policy_state_dict" not in owners:
            # torchrl refuses a state without a policy's, also its own, unless it is lenient.
            if strict:
                self.env.load_state_dict(state_dict["env_state_dict"], **kwargs)
            state_dict = {k: v for k, v in state_dict.items() if k != "policy_state_dict"}
            kwargs = {"strict": False}
        super().load_state_dict(state_dict, **kwargs)

    def _checked_state(self, state_dict: Any, strict: bool) -> tuple[Any, dict[str, Any]]:
        """A state that fits, and what is to load which of its entries."""
        self._require_open()
        given = self._channel is not None and self._channel.loaded is not None
        if given:  # they are memory that is read-only
            state_dict = {k: v for k, v in state_dict.items() if k != "policy_state_dict"}
        owners = {"env_state_dict": self.env}
        if not given and hasattr(self, "_policy_w_state_dict"):
            owners["policy_state_dict"] = self._policy_w_state_dict
        check_state(state_dict, owners, self.policy_version_tracker, strict)
        return state_dict, owners
