"""torchrl's collector of dialogs over a loop of our own: what it is behind its public face."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict
from torchrl.collectors.llm.base import LLMCollector as _LLMCollector

from fusedrl.collectors.batch_stream import SHUT_DOWN, BatchStream, Ready
from fusedrl.collectors.versions import Versions
from fusedrl.weights.follow import refuse_another_policy
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import write_weights


class LoopCollector(_LLMCollector):
    """torchrl's collector of dialogs over a loop, and versions of weights, of our own.

    Most methods are those that torchrl's constructor and methods call.

    Attributes:
        _versions: is there before torchrl's constructor runs.
        _loop: the :class:`TurnLoop` that runs the turns; it is made afterwards.
        _stream: its batches, and the thread that may take them; it is there before, too.
        _ends: whether collecting ends before the next turn.
    """

    _versions: Versions
    _loop: Any = None
    _stream: RolloutBatches
    closed = True  # until the constructor has succeeded
    _ends = False

    def __bool__(self) -> bool:
        """Always true: Ray asks its actors, and the length that torchrl gives may be infinite."""
        return True

    def _setup_weight_sync(self, weight_updater: Any, weight_sync_schemes: Any) -> None:
        # torchrl tells the collector only to schemes that nobody has initialised before.
        for scheme in (weight_sync_schemes or {}).values():
            if isinstance(scheme, ChannelWeightSyncScheme):
                scheme.join(self)  # pyright: ignore[reportAttributeAccessIssue]
        super()._setup_weight_sync(weight_updater, weight_sync_schemes)

    def _setup_policy_version_tracking(self, track_policy_version: Any) -> None:
        """Do nothing: the versions have the tracker already."""

    @property
    def policy_version_tracker(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The :class:`PolicyVersion` that tags turns, or ``None``."""
        return self._versions.tracker

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
        return 0 if self._loop is None else self._loop.frames

    @_frames.setter
    def _frames(self, frames: int) -> None:
        if self._loop is not None:
            self._loop.frames = frames

    @property
    def _traj_pool(self) -> Any:
        return None if self._loop is None else self._loop.trajectories

    def _make_carrier(self) -> None:
        # torchrl resets here and once more at the first rollout: a batch of prompts would be lost.
        self._carrier = TensorDict()

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        """Do not call the policy, to know its keys: an LLM would answer the lost prompts."""

    def _maybe_fallback_update(
        self, policy_or_weights: Any = None, *, model_id: str | None = None
    ) -> None:
        # torchrl calls this without an updater and a scheme, and takes tensordicts only.
        if policy_or_weights is None or model_id not in (None, "policy"):
            super()._maybe_fallback_update(policy_or_weights, model_id=model_id)
        else:
            write_weights(self.policy, policy_or_weights)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        with self._versions.update(numbered=model_version is not None):
            super()._receive_weights_scheme(model_version=model_version)

    def _require_open(self) -> None:
        self._stream.background.check()
        if self.closed or self._ends:
            raise RuntimeError(SHUT_DOWN)

    def _count(self, frames: int) -> None:
        self._iter += 1
        self._increment_frames(frames)


class RolloutBatches(BatchStream):
    """The batches of turns that run in the thread that iterates."""

    counter = "LLMCollector.stale_turns"

    def check(self) -> None:
        """Raise ``RuntimeError`` if the collector is closed."""
        self._collector._require_open()

    def _wait(self) -> Ready | None:
        collector: Any = self._collector
        if collector._frames >= collector.total_frames:
            return None
        self.buffer = collector.replay_buffer
        return Ready(collector.rollout())

    def _count(self, arrived: Ready) -> bool:
        self._collector._count(arrived.batch.numel())
        return True

    def _request(self) -> None:
        """Do nothing: the next turns run when they are asked for."""

    def _finished(self, batch: Any) -> Any:
        batch = super()._finished(batch)
        if self._collector.post_collect_hook is not None:
            self._collector.post_collect_hook(batch)
        return batch
