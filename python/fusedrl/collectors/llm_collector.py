"""torchrl's ``LLMCollector``: dialogs between a policy and an environment, in batches."""

from __future__ import annotations

import inspect
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector, Collector
from torchrl.envs import AsyncEnvPool, EnvBase

from fusedrl.channel.following import Following
from fusedrl.collectors.batch_stream import Batches
from fusedrl.collectors.batches import batches_of
from fusedrl.collectors.loop_collector import LoopCollector, RolloutBatches
from fusedrl.collectors.options import (
    DialogOptions,
    check_environment,
)
from fusedrl.collectors.policy_version import tracked
from fusedrl.collectors.pool_turns import PoolLoop
from fusedrl.collectors.state import copied, load_or_undo
from fusedrl.collectors.turns import TurnLoop
from fusedrl.collectors.versions import Versions
from fusedrl.compat.torchrl import policy_with_state, receives_by_schemes
from fusedrl.weights.follow import follow_channel
from fusedrl.weights.updaters import write_weights
from fusedrl.weights.worker_end import POLICY_STATE


class LLMCollector(LoopCollector):
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

    def __init__(self, env: Any, **arguments: Any) -> None:
        options = DialogOptions(env, **arguments)
        self._collecting = threading.RLock()  # held by the thread that runs turns
        self._stream = RolloutBatches(self, None)
        env = options.env if isinstance(options.env, EnvBase) else options.env()
        self.yield_only_last_steps = bool(options.yield_only_last_steps)
        self.yield_completed_trajectories = options.completed
        check_environment(env, options.async_envs, options.completed)
        self.async_envs = isinstance(env, AsyncEnvPool)
        policy = options.policy if options.policy_factory is None else options.policy_factory()
        self._versions = Versions()
        with ExitStack() as undo:
            undo.callback(self._versions.leave)
            if options.channel is not None:
                channel, mode = options.channel, options.channel_mode
                self._versions.follow(*follow_channel(channel, policy, mode))
            env, self._versions.tracker = tracked(env, options.track_policy_version)
            # Not the constructor of torchrl's LLMCollector, which has no weight_sync_schemes.
            Collector.__init__(
                self,
                env,
                policy,
                frames_per_batch=options.dialog_turns_per_batch or 1,
                total_frames=options.total_dialog_turns,  # pyright: ignore[reportArgumentType]
                replay_buffer=options.buffer,
                weight_updater=options.weight_updater,
                weight_sync_schemes=options.weight_sync_schemes,
                reset_at_each_iter=options.reset_at_each_iter,
                postproc=options.postproc,
                trust_policy=True,
                use_buffers=False,
                no_cuda_sync=True,
                # That would add an InitTracker, which no language model reads, or else warn.
                auto_register_policy_transforms=False,
            )
            undo.pop_all()
        flat = options.flatten_data
        self.flatten_data = self.replay_buffer is not None if flat is None else flat
        self.progress, self.verbose = options.progress, options.verbose
        self.max_staleness = options.max_staleness
        batches = batches_of(
            self.env,
            self.requested_frames_per_batch,
            self.flatten_data,
            self.yield_completed_trajectories,
            self.yield_only_last_steps,
        )
        loop = PoolLoop if self.async_envs else TurnLoop
        self._loop = loop(self.env, batches, self._versions, self.total_frames)
        for inner in getattr(env, "envs", ()) if self.async_envs else ():
            inner.register_collector(self)  # environments in processes cannot know the collector

    __init__.__signature__ = inspect.signature(DialogOptions.__init__)  # pyright: ignore[reportFunctionMemberAccess]

    @property
    def stale_turns(self) -> int:
        """Turns that ``max_staleness`` dropped."""
        return self._stream.dropped

    # Batches.

    def __iter__(self) -> Iterator[Any]:
        """Batches; an error but Ctrl-C shuts the collector down, and the next call says so."""
        return Batches(super().__iter__)

    def iterator(self) -> Iterator[Any]:
        """Yield batches until ``total_dialog_turns`` have run; ``None`` if a buffer gets them."""
        yield from self._stream.rest()

    def start(self) -> None:
        """Fill the replay buffer from a thread, until the end or :meth:`shutdown`.

        An error in the thread is logged at once and raised by the next call.

        Raises:
            RuntimeError: there is no replay buffer.
        """
        self._require_open()
        self._stream.background.start(self.__iter__, self.replay_buffer)

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread still fills the buffer."""
        return self._stream.background.is_running()

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Run turns until there is a batch, and return it before any postprocessing."""
        self._require_open()
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        if self.reset_at_each_iter:
            self._loop.restart()
        with self._collecting:
            return self._loop.batch(self.policy, self._require_open)

    def is_initialized(self) -> bool:
        """Whether the collector can be used: it is not shut down."""
        return not self.closed

    # Weights and versions.

    @property
    def weight_updater(self) -> Any:
        """The weight updater, or ``None``. Setting one registers it with this collector."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            made = hasattr(value, "register_collector") and not isinstance(value, type)
            value = value if made else value()
            value.register_collector(self)
            for name in ("push_weights", "update_weights"):  # torchrl's name, and ours
                if hasattr(value, name):  # an update is one version, whoever calls it
                    setattr(value, name, self._versions.update()(getattr(value, name)))
        self._weight_updater = value

    @property
    def policy_version(self) -> Any:
        """The version that the next turn will have; ``None`` if versions are not tracked.

        With a channel it is the newest published version.
        """
        return self._versions.newest

    def increment_version(self) -> None:
        """Count a new version of the policy. During an update, several calls count one."""
        self._versions.count()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the policy's weights, as torchrl's collectors do, and count one version.

        A turn that runs in another thread ends first, and the next one begins afterwards, unless a
        channel brings the weights. With ``channel=`` this does nothing: the next turn takes the
        newest version.

        Raises:
            ValueError: the policy does not have such names or shapes, or ``weights_dict`` is given
                without schemes. Nothing has changed then.
            RuntimeError: the thread is within a turn, or the policy has no module and there is
                neither an updater nor a scheme.
            TimeoutError: the turn does not end within 10 minutes.
        """
        self._stream.background.check()
        if self._versions.close is not None and not args and not kwargs:
            return
        if kwargs.get("weights_dict") is not None and not self._weight_sync_schemes:
            raise ValueError(
                "weights_dict: expected None without weight_sync_schemes, whose models it names, "
                "got weights; pass those of the policy as the first argument"
            )
        with self._versions.update():
            super().update_policy_weights_(*args, **kwargs)

    def receive_weights(
        self, policy_or_weights: Any = None, *, weights: Any = None, policy: Any = None
    ) -> None:
        """Take the given weights, or those of the receiving schemes, and count one version.

        It waits and raises as :meth:`update_policy_weights_`.
        """
        named = [each for each in (policy_or_weights, weights, policy) if each is not None]
        has_schemes = receives_by_schemes(self)
        if not named and not has_schemes:
            return
        with self._versions.update():
            if has_schemes or len(named) > 1:  # the second is refused
                receive: Any = super().receive_weights
                receive(policy_or_weights, weights=weights, policy=policy)
            else:
                write_weights(self.policy, named[0])

    def hold_turns(self, follower: Following) -> Callable[[bool], None]:
        """Let each turn hold one version of what follows a channel.

        Returns:
            A function that undoes it; its argument says whether the policy keeps its version.

        Raises:
            ValueError: another channel is followed.
        """
        return self._versions.follow(follower)

    def scoring(self) -> AbstractContextManager[Any]:
        """Give the policy the version of the turn in which a transform of ``env`` calls this."""
        # In a pool, updates wait for the environments.
        return nullcontext() if self.async_envs else self._versions.call()

    def reset(self, index: Any = None, **kwargs: Any) -> None:
        """Start new dialogs at the next rollout; no later batch has turns from before.

        Raises:
            NotImplementedError: an ``index`` is given.
        """
        if index is not None or kwargs:
            raise NotImplementedError(
                "index: expected None, got a part of the environment; all dialogs start anew"
            )
        self._restart()

    def _restart(self) -> None:
        self._loop.restart(finished=True)
        self._stream.forget()

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
            raise_on_error: whether to raise the errors of closing, or the error that ended the
                thread of :meth:`start` and was not raised yet.
        """
        background = self._stream.background
        # torchrl shuts down a collector that fails, which is no reason to forget why.
        if not background.is_current() or sys.exc_info()[0] is None:
            background.stop()
        background.join(timeout)
        if not background.is_running():
            self._ends = True
            # Closed while it steps, an environment fails in ways that do not say why.
            if self._collecting.acquire(timeout=-1 if timeout is None else timeout):
                self._collecting.release()
        try:
            super().shutdown(timeout=timeout, close_env=close_env, raise_on_error=raise_on_error)
        finally:
            self._versions.leave()
        if raise_on_error and not background.is_current():
            background.check()

    async_shutdown: Any = BaseCollector.async_shutdown  # calls shutdown()

    def state_dict(self) -> Any:
        """The state of environment, policy, counts and version; later rollouts do not change it."""
        self._require_open()
        state = super().state_dict()
        if self._versions.follower is not None and POLICY_STATE in state:
            # A scheme in the trainer's process gives the collector a policy of its own.
            state[POLICY_STATE] = copied(self.policy.state_dict())
        return state

    def load_state_dict(self, state_dict: Any, **kwargs: Any) -> None:
        """Restore environment, policy, counts and version; dialogs start anew.

        If weights have come from a channel, the policy keeps them and their version, unless it is
        the channel of a scheme in the trainer's process: that publishes the restored policy, under
        its version or a greater one.

        Args:
            state_dict: a state that :meth:`state_dict` has returned.
            kwargs: ``strict=False`` takes a state that lacks the policy or the environment.

        Raises:
            KeyError, RuntimeError: entries are missing or do not fit, and nothing has changed, or
                the collector is shut down.
        """
        self._require_open()
        own, follower = OrderedDict(state_dict), self._versions.follower
        loads = policy_with_state(self)
        # What has come through a channel lies in memory that is only read.
        brought = loads is self.policy and follower is not None and follower.version is not None
        if brought or loads is None:
            own.pop(POLICY_STATE, None)
            kwargs = {**kwargs, "strict": False}
        self._restart()
        with nullcontext() if follower is not None else self._versions.update(numbered=True):
            load_or_undo(super(), own, **kwargs)
