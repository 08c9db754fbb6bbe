"""torchrl's ``LLMCollector``: dialogs between a policy and an environment, in batches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NoReturn

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.collectors.llm.base import LLMCollector as _LLMCollector
from torchrl.collectors.utils import _maybe_normalize_replay_buffer_tensordict_device
from torchrl.envs import AsyncEnvPool, EnvBase

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.batches import DialogBatches, FlatBatches, TurnBatches
from fusedrl.collectors.checks import check_environment, check_staleness
from fusedrl.collectors.dialog_options import DialogOptions
from fusedrl.collectors.policy_version import KEY, PolicyVersion, versions_in
from fusedrl.collectors.pool_turns import PoolLoop
from fusedrl.collectors.progress import check_progress, progress_bar
from fusedrl.collectors.queues import QueueBuffer
from fusedrl.collectors.staleness import is_too_old
from fusedrl.collectors.state import check_state
from fusedrl.collectors.stopwatch import Profile
from fusedrl.collectors.turn_rows import private_keys
from fusedrl.collectors.turns import TurnLoop
from fusedrl.collectors.versions import Versions
from fusedrl.weights.copying import copy_weights
from fusedrl.weights.follow import UnnumberedError, refuse_another_policy
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme


class LLMCollector(_LLMCollector):
    """Collects dialogs: iterate to get batches of turns, of shape (dialogs, time) or (turns,).

    It takes the place of torchrl's class, and ``isinstance`` accepts it as one. Each turn says to
    which trajectory it belongs (``("collector", "traj_ids")``) and, if versions are tracked, which
    version the policy had when it was called for the turn (``"policy_version"``, also in
    ``"next"``).

    Args:
        env: an environment, or a function that makes one.
        policy: takes a tensordict and returns one, either a new one or the same.
        policy_factory: a function that makes the policy; pass it instead of ``policy``.
        dialog_turns_per_batch: number of turns in a batch, rounded up to whole steps of the
            environment. Completed trajectories do not need it.
        yield_only_last_steps: yield only the last turn of each completed trajectory. The other
            turns still count towards ``total_dialog_turns``.
        yield_completed_trajectories: yield batches of completed trajectories, one after the other,
            with at least ``dialog_turns_per_batch`` turns. An ``AsyncEnvPool`` yields each
            trajectory as soon as it is complete. The default is the value of
            ``yield_only_last_steps``.
        postproc: a function that gets each batch and returns what is yielded or stored.
        total_dialog_turns: number of turns to run in all; -1 never ends.
        async_envs: ``True`` asserts that ``env`` is an ``AsyncEnvPool``. The collector sees that
            without it.
        replay_buffer: a buffer that is extended with each batch; the iterator then yields ``None``.
        reset_at_each_iter: start new dialogs for each batch; dialogs that are running end.
        flatten_data: whether batches have one dimension, dialog after dialog, instead of (dialogs,
            time). By default they have if there is a ``replay_buffer`` or a ``queue``.
        weight_updater: an updater of torchrl's or of ours, or a function that makes one.
        weight_sync_schemes: torchrl's schemes by the names of their models, instead of an updater.
        queue: takes single turns instead of a ``replay_buffer``. If it is full, it drops the
            oldest.
        channel: a reader or handle of the channel from which the policy's weights come. Each turn,
            from the policy's call to the last transform of ``env``, computes with the version that
            is newest when it begins. Before the first version it computes with the policy's own
            weights, as version 0. A handle is opened here and closed at shutdown.
        channel_mode: ``"alias"`` or ``"copy"``, as for :meth:`fusedrl.WeightReader.load_into`.
        copy_turns: copy what policy and environment return, because they may write into it later.
            Pass ``False`` if they return new tensors at each turn; batches then share memory with
            what they keep.
        track_policy_version: whether to tag turns, or the :class:`PolicyVersion` that tags them. It
            is added to the environment unless it is there; an ``AsyncEnvPool`` needs none.
        max_staleness: drop a batch if its oldest turn is more than this number of versions behind
            the policy's, or the channel's; ``stale_turns`` counts the dropped turns.
        progress: show a progress bar, with rich: turns, tokens, version, staleness.
        verbose: log the same figures for each batch, unless there is a bar.

    Raises:
        TypeError: arguments exclude each other, or one is missing.
        ValueError: a number is out of range, the environment does not have the one batch dimension
            that completed trajectories need, or the environments of a pool have several dialogs
            each.
        RuntimeError: ``async_envs`` without an ``AsyncEnvPool``, a queue beside a replay buffer, or
            weights that are given to a collector with a channel.

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
        copy_turns: bool = True,
        track_policy_version: bool | PolicyVersion = False,
        max_staleness: int | None = None,
        progress: bool = False,
        verbose: bool = False,
    ) -> None:
        self.closed = True
        self._collecting = threading.RLock()  # held by the thread that runs turns
        renew_in_children(self, _collecting=threading.RLock)
        self._ends = False  # whether collecting ends before the next turn
        DialogOptions(
            policy=policy,
            policy_factory=policy_factory,
            dialog_turns_per_batch=dialog_turns_per_batch,
            yield_only_last_steps=yield_only_last_steps,
            yield_completed_trajectories=yield_completed_trajectories,
            total_dialog_turns=total_dialog_turns,
            flatten_data=flatten_data,
            reset_at_each_iter=reset_at_each_iter,
            replay_buffer=replay_buffer,
            queue=queue,
            weight_updater=weight_updater,
            weight_sync_schemes=weight_sync_schemes,
            channel=channel,
            channel_mode=channel_mode,
            copy_turns=copy_turns,
            track_policy_version=track_policy_version,
            max_staleness=max_staleness,
        ).check()
        check_progress(progress)
        env = env if isinstance(env, EnvBase) else env()
        self.yield_only_last_steps = bool(yield_only_last_steps)
        self.yield_completed_trajectories = bool(
            yield_completed_trajectories or yield_only_last_steps
        )
        check_environment(env, async_envs, self.yield_completed_trajectories)
        self.async_envs = isinstance(env, AsyncEnvPool)
        policy = policy if policy_factory is None else policy_factory()
        self._versions = Versions()
        with ExitStack() as undo:
            undo.callback(self._versions.close)
            if channel is not None:
                self._versions.open(channel, policy, channel_mode)
            env, self._versions.tracker = self._tracked(env, track_policy_version)
            replay_buffer = replay_buffer if queue is None else QueueBuffer(queue)
            # Not the constructor of torchrl's LLMCollector, which has no weight_sync_schemes.
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
                # That would add an InitTracker, which no language model reads, or else warn.
                auto_register_policy_transforms=False,
            )
            undo.pop_all()
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self._max_staleness, self.stale_turns = max_staleness, 0
        self.progress, self.verbose = progress, verbose
        self._loop = self._new_loop(copy_turns)
        for inner in getattr(env, "envs", ()) if self.async_envs else ():
            inner.register_collector(self)  # environments in processes cannot know the collector

    def _new_loop(self, copy_turns: bool) -> TurnLoop | PoolLoop:
        wanted = self.requested_frames_per_batch
        if self.yield_completed_trajectories:
            rows, least = self.env.batch_size[0], 1 if self.async_envs else wanted
            batches = DialogBatches(rows, least, self.yield_only_last_steps)
        else:
            batches = (FlatBatches if self.flatten_data else TurnBatches)(wanted)
        if self.async_envs:
            return PoolLoop(self.env, batches, self._versions, copy_turns, self.total_frames)
        return TurnLoop(self.env, batches, self._versions, copy_turns)

    def _tracked(self, env: Any, track: bool | PolicyVersion) -> tuple[Any, Any]:
        """The environment with the tracker, and the tracker."""
        if track is False:
            return env, None
        tracker = PolicyVersion() if track is True else track
        if not self.async_envs and tracker.container is None:
            env = env.append_transform(tracker)
        if not self.async_envs and KEY not in list(env.observation_spec):
            raise ValueError(
                "track_policy_version: expected a tracker that is in env or in none, got one of "
                "another environment; make a PolicyVersion for each"
            )
        return env, tracker

    @property
    def max_staleness(self) -> int | None:
        """Versions that the oldest turn of a batch may be behind; ``None`` keeps all batches."""
        return self._max_staleness

    @max_staleness.setter
    def max_staleness(self, most: int | None) -> None:
        check_staleness(most, self.policy_version_tracker or False)
        self._max_staleness = most

    # The next methods are called by torchrl's constructor and methods.

    def _setup_weight_sync(self, weight_updater: Any, weight_sync_schemes: Any) -> None:
        # torchrl tells the collector only to schemes that nobody has initialised before.
        for scheme in (weight_sync_schemes or {}).values():
            if isinstance(scheme, ChannelWeightSyncScheme):
                scheme.join(self)  # pyright: ignore[reportAttributeAccessIssue]
        super()._setup_weight_sync(weight_updater, weight_sync_schemes)

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        """Do nothing: there is a tracker already."""

    @property
    def policy_version_tracker(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The :class:`PolicyVersion` that tags turns, or ``None``."""
        return self._versions.tracker

    @policy_version_tracker.setter
    def policy_version_tracker(self, tracker: Any) -> None:
        self._versions.tracker = tracker

    @property
    def policy(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The policy; another one may be set unless its weights come from a channel."""
        return self._policy

    @policy.setter
    def policy(self, policy: Any) -> None:
        followed = self._versions.follower is not None and "_policy" in vars(self)
        if followed and policy is not self._policy:
            refuse_another_policy()
        self._policy = policy

    @property
    def _frames(self) -> int:
        return self._loop.frames if "_loop" in vars(self) else 0

    @_frames.setter
    def _frames(self, frames: int) -> None:
        if "_loop" in vars(self):
            self._loop.frames = frames

    @property
    def _watch(self) -> Any:
        return self._loop.watch

    @property
    def _traj_pool(self) -> Any:
        return self._loop.trajectories.source

    def _make_carrier(self) -> None:
        # torchrl resets here and once more at the first rollout: a batch of prompts would be lost.
        self._carrier = TensorDict()

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        # torchrl calls the policy here, to know its keys; an LLM would answer the lost prompts.
        if make_rollout:
            super()._maybe_make_final_rollout(make_rollout)

    # Batches.

    def __iter__(self) -> Iterator[Any]:
        """As :meth:`iterator`; an error of the policy or of the environment shuts it down."""
        self._iteration_started = True  # torchrl's profiler asks
        try:
            yield from self.iterator()
        except UnnumberedError:
            raise  # no turn was begun, and increment_version() lets it go on
        except Exception:
            self.shutdown()
            raise

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_dialog_turns`` have run; ``None`` if a buffer gets them."""
        self._require_open()
        watch = self._loop.watch
        with progress_bar(self) as advance:
            while self._frames < self.total_frames:
                self._iter += 1
                batch = self.rollout()
                watch.start()
                self._increment_frames(batch.numel())
                advance(batch)
                if self._is_stale(batch):
                    continue
                batch = self._postproc(batch)
                if self.post_collect_hook is not None:
                    self.post_collect_hook(batch)
                if self.replay_buffer is not None:
                    batch = _maybe_normalize_replay_buffer_tensordict_device(
                        batch, self.replay_buffer
                    )
                    self.replay_buffer.extend(batch)
                    batch = None
                made = [batch]
                del batch  # only the caller may keep it alive while the next one is made
                watch.lap("queueing")
                yield made.pop()

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Run turns until there is a batch, and return it before any postprocessing."""
        self._require_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        self._loop.watch.start()
        if self.reset_at_each_iter:
            self._loop.interrupt()
        self._loop.prepare(self.policy)
        with self._collecting:
            batch = self._loop.batch(self._call_policy)
        self._loop.watch.lap("queueing")
        return batch

    def _call_policy(self, carried: TensorDictBase) -> TensorDictBase:
        if self._ends:
            self._refuse_closed()
        return self.policy(carried)

    def _is_stale(self, batch: TensorDictBase) -> bool:
        if self.max_staleness is None:
            return False
        late = self.policy_version - min(versions_in(batch))
        if is_too_old(late, self.max_staleness, self.stale_turns, "LLMCollector.stale_turns"):
            self.stale_turns += batch.numel()
            return True
        return False

    def _postproc(self, batch: TensorDictBase) -> TensorDictBase:
        if self.postproc is not None:
            batch = self.postproc(batch)
        private = list(private_keys(batch))
        return batch.exclude(*private, inplace=True) if private else batch

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set the postprocessing of a collector that has none.

        Raises:
            RuntimeError: it has one already.
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
        """The class of Ray actors that are such a collector.

        Args:
            remote_config: Ray's options for them.
        """
        # Ray takes no empty options, which torchrl gives it.
        return super().as_remote(remote_config or {"max_concurrency": 1})

    def is_initialized(self) -> bool:
        """Whether the collector can be used: it is not shut down."""
        return not self.closed

    def next(self) -> TensorDictBase | None:
        """The next batch, without a device, or ``None`` at the end."""
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            batch = next(self._iterator, None)
        except UnnumberedError:
            self._iterator = None  # this one has ended, and another one can go on
            raise
        return batch if batch is None or batch.device is None else batch.clear_device_()

    # Weights and versions.

    @property
    def weight_updater(self) -> Any:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            self._refuse_beside_channel()
            made = hasattr(value, "register_collector") and not isinstance(value, type)
            value = value if made else value()
            value.register_collector(self)
            self._versions.take_updates_of(value)
        self._weight_updater = value

    @property
    def policy_version(self) -> Any:
        """The version that the next turn will have; ``None`` if versions are not tracked.

        With a channel it is the newest published version.
        """
        return self._versions.newest

    def set_weight_updater(self, weight_updater: Any) -> bool:
        """Set the weight updater. Returns ``True``, because remote calls want an answer."""
        self.weight_updater = weight_updater
        return True

    def increment_version(self) -> None:
        """Count a new version of the policy. During an update, several calls count one."""
        self._versions.count()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the policy's weights, as torchrl's collectors do, and count one version.

        A turn that runs in another thread ends first, and the next one begins afterwards, unless a
        channel brings the weights. With ``channel=`` this does nothing: the next turn takes the
        newest version.

        Raises:
            ValueError: the policy does not have such names or shapes. Nothing has changed then.
            RuntimeError: the thread is within a turn, or the policy has no module and there is
                neither an updater nor a scheme.
            TimeoutError: the turn does not end within 10 minutes.
        """
        if self._versions.is_open and not args and not kwargs:
            return
        self._refuse_beside_channel()
        schemes = (self._weight_sync_schemes or {}).values()
        publishes = [isinstance(scheme, ChannelWeightSyncScheme) for scheme in schemes]
        with self._versions.one_update(waits=not publishes or not all(publishes)):
            super().update_policy_weights_(*args, **kwargs)

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        # torchrl calls this without an updater and a scheme, and takes tensordicts only.
        if policy_or_weights is None or model_id not in (None, "policy"):
            super()._maybe_fallback_update(policy_or_weights, model_id=model_id)
        else:
            self._write(policy_or_weights)

    def _write(self, weights: Any) -> None:
        """Write weights of any form into the policy."""
        for policy in (self.policy, getattr(self.policy, "model", None)):
            if isinstance(policy, nn.Module):
                copy_weights(weights, TensorDict.from_module(policy))
                return
        raise RuntimeError(
            f"policy: expected a module, or what has one as its model, got "
            f"{type(self.policy).__name__}; pass a weight_updater= that knows it"
        )

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Take the given weights, or those of the receiving schemes, and count one version.

        It waits and raises as :meth:`update_policy_weights_`.
        """
        given = [each for each in (policy_or_weights, weights, policy) if each is not None]
        has_schemes = getattr(self, "_receiver_schemes", None) is not None
        if not given and not has_schemes:
            return
        self._refuse_beside_channel()
        with self._versions.one_update():
            if has_schemes or len(given) > 1:  # the second is refused
                receive: Any = super().receive_weights
                receive(policy_or_weights, weights=weights, policy=policy)
            else:
                self._write(given[0])

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        with self._versions.one_update(numbered=model_version is not None):
            super()._receive_weights_scheme(model_version=model_version)

    def _refuse_beside_channel(self) -> None:
        if self._versions.is_open:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )

    def hold_turns(self, follower: Following) -> Callable[[bool], None]:
        """Let each turn hold one version of what follows a channel.

        Returns:
            A function that undoes it; its argument says whether the policy keeps its version.

        Raises:
            ValueError: versions are tracked as UUIDs, or another channel is followed.
        """
        self._versions.follow(follower)
        return self._versions.leave

    @property
    def scored_policy(self) -> Any:
        """The policy that transforms of ``env`` compute with, within :meth:`scoring`."""
        return self._loop.scored(self.policy)

    def scoring(self) -> AbstractContextManager[Any]:
        """Give :attr:`scored_policy` the version of the turn in which ``env`` calls this."""
        return self._loop.scoring()

    def _require_open(self) -> None:
        if self.closed:
            self._refuse_closed()

    def _refuse_closed(self) -> NoReturn:
        raise RuntimeError(
            "collector: expected one that runs, got one that was shut down; make a new one"
        )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seed the environment; returns the seed that follows.

        Raises:
            RuntimeError: the collector is shut down.
        """
        self._require_open()
        return super().set_seed(seed, static_seed=static_seed)

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs at the next rollout; no later batch has turns from before.

        Raises:
            NotImplementedError: an ``index`` is given.
        """
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environment; all dialogs start anew"
            )
        self._loop.clear()

    def shutdown(
        self,
        timeout: float | None = None,
        close_env: bool = True,
        raise_on_error: bool = True,
    ) -> None:
        """End a thread that was started, close the environment, and stop following the channel.

        A rollout in another thread ends after its current turn, with a ``RuntimeError``.

        Args:
            timeout: seconds to wait for the thread, or for the current turn.
            close_env: whether to close the environment too.
            raise_on_error: whether to raise the errors of closing.
        """
        if not self.is_running():  # otherwise torchrl waits for the thread that it has started
            self._ends = True
            # Closed while it steps, an environment fails in ways that do not say why.
            if self._collecting.acquire(timeout=-1 if timeout is None else timeout):
                self._collecting.release()
        try:
            super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            if "_loop" in vars(self):  # otherwise the constructor has failed
                self._loop.close()
                self._versions.close()

    def profile(self) -> Profile:
        """Where the time went since the collector was made: policy, env, stamping, queueing."""
        return self._loop.watch.profile()

    def state_dict(self) -> Any:
        """The state of environment, policy, counts and version; later rollouts do not change it."""
        self._require_open()
        state = super().state_dict()
        weights = state.get("policy_state_dict", {})
        for name, value in weights.items() if self._versions.follower is not None else ():
            weights[name] = value.clone() if isinstance(value, Tensor) else value
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore environment, policy, counts and version; dialogs start anew.

        If weights have come from a channel, the policy keeps them and their version.

        Args:
            state_dict: a state that :meth:`state_dict` has returned.
            kwargs: ``strict=False`` takes a state that lacks the policy or the environment.

        Raises:
            ValueError: entries are missing or do not fit. Nothing has changed then.
            RuntimeError: the collector is shut down.
        """
        strict = kwargs.get("strict", True)
        state_dict, owners = self._checked_state(state_dict, strict)
        self._loop.clear()
        with self._versions.gate.update():
            if "policy_state_dict" not in owners:
                # torchrl refuses a state without a policy's, also its own, unless it is lenient.
                if strict:
                    self.env.load_state_dict(state_dict["env_state_dict"], **kwargs)
                state_dict = {k: v for k, v in state_dict.items() if k != "policy_state_dict"}
                kwargs = {"strict": False}
            super().load_state_dict(state_dict, **kwargs)

    def _checked_state(self, state_dict: Any, strict: bool) -> tuple[Any, dict[str, Any]]:
        """A state that was checked, and the object that will load each of its entries."""
        self._require_open()
        follower = self._versions.follower
        given = follower is not None and follower.version is not None
        if given:  # the policy's weights lie in read-only memory
            state_dict = {k: v for k, v in state_dict.items() if k != "policy_state_dict"}
        owners: dict[str, Any] = {"env_state_dict": self.env}
        if not given and hasattr(self, "_policy_w_state_dict"):
            owners["policy_state_dict"] = self._policy_w_state_dict
        check_state(state_dict, owners, self.policy_version_tracker, strict)
        return state_dict, owners
