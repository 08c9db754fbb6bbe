"""Weights and versions of an ``AsyncCollector``, in the trainer's process."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torchrl.collectors import AsyncCollector as _AsyncCollector

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.sources import module_slots
from fusedrl.collectors.policy_version import PolicyVersion
from fusedrl.collectors.process.worker_process import WorkerProcess
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import MultiProcessedRemoteWeightUpdate
from fusedrl.weights.worker_end import is_policy


class AsyncUpdates(_AsyncCollector):
    """How :class:`fusedrl.AsyncCollector` sends weights: each update is one version."""

    policy: Any
    policy_version_tracker: Any
    _worker: WorkerProcess | None
    _reader: WeightReader | None  # of a channel that another publishes
    _weight_sync_schemes: dict[str, Any]
    _thread_error: BaseException | None  # of start()

    def _raise_thread_error(self) -> None:
        """Raise what ended the thread of start(), once."""
        if self._thread_error is not None:
            error, self._thread_error = self._thread_error, None
            raise error

    def _set_up_weights(
        self,
        schemes: dict[str, Any] | None,
        updater: Any,
        channel: WeightHandle | None,
    ) -> None:
        """Publish what the worker starts with."""
        self._reader = None if channel is None else channel.open()
        self._weight_updater = None
        if updater is not None:
            updater = updater if hasattr(updater, "register_collector") else updater()
        self._weight_sync_schemes = {} if schemes is None else schemes
        weights = _weights_of(self.policy, updater)
        if schemes is None and channel is None and weights is not None:
            scheme: Any = ChannelWeightSyncScheme()
            self._weight_sync_schemes["policy"] = scheme
            if weights is not self.policy:
                scheme.init_on_sender(model_id="policy", weights=weights)
        for name, scheme in self._weight_sync_schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=name, context=self)
            if not scheme.synchronized_on_sender:
                scheme.connect()
        self.weight_updater = updater

    def _brought(self) -> list[Tensor]:
        """Tensors of the policy that need not be sent to the worker: the channel has them."""
        scheme = self._weight_sync_schemes.get("policy")
        if scheme is None or not isinstance(self.policy, nn.Module):
            return []
        names = {*scheme.channel.layout.view_of, *scheme._buffers}
        return [slot.tensor for slot in module_slots(self.policy) if slot.name in names]

    @property
    def weight_updater(self) -> Any:
        """The weight updater, if any; one that is set is registered with this collector."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            if self._reader is not None:
                raise RuntimeError(
                    "channel: expected weights to come through it, got an updater; publish them"
                )
            value = value if hasattr(value, "register_collector") else value()
            hook = self._hook_for(value)
            value.register_collector(self)
            value.register_post_hook(hook)
        self._weight_updater = value

    def _hook_for(self, updater: Any) -> Callable[[], None]:
        """What makes one version of each update."""
        scheme = self._weight_sync_schemes.get("policy")
        if not isinstance(updater, MultiProcessedRemoteWeightUpdate):
            return _Counted(self)
        if scheme is None:
            raise ValueError(
                "weight_updater: expected a policy with weights for it, got none; pass policy="
            )
        workers = updater.all_worker_ids()
        if len(workers) != 1:
            raise ValueError(
                f"policy_weights: expected one entry for the one worker, got {workers}; drop others"
            )
        updater._channels = {workers[0]: scheme.channel}
        return _nothing

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Publish one version, as torchrl's collectors do; the worker is not waited for.

        With a ``channel`` there is nothing to be done: the next call of the policy has the newest.

        Raises:
            RuntimeError: weights beside a channel, or no way for them to reach the policy.
        """
        self._raise_thread_error()
        if self._reader is None:
            super().update_policy_weights_(*args, **kwargs)
        elif args or kwargs:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )

    def _numbered(self) -> Any:
        """What numbers the policy's versions, if it is not this collector."""
        if self._reader is not None:
            return self._reader
        schemes = self._weight_sync_schemes.items()
        return next((scheme for name, scheme in schemes if is_policy(name)), None)

    @property
    def policy_version(self) -> Any:
        """The newest published version; ``None`` if none is tracked.

        Frames have that of the call of the policy that made them.
        """
        if self.policy_version_tracker is None:
            return None
        numbered = self._numbered()
        newest = None if numbered is None or self.closed else numbered.version
        return self.policy_version_tracker.version if newest is None else newest

    def increment_version(self) -> None:
        """Count a version, also in the worker; versions of a channel are counted as they come."""
        if self.policy_version_tracker is None or self._numbered() is not None:
            return
        self.policy_version_tracker.increment_version()
        if self._worker is not None:
            self._worker.set_version(self.policy_version_tracker.version)

    def _close_weights(self) -> None:
        if self.policy_version_tracker is not None and not self.closed:
            newest = self.policy_version
            if newest != self.policy_version_tracker.version:
                self.policy_version_tracker.version = newest
        for scheme in self._weight_sync_schemes.values():
            scheme.shutdown()
        if self._reader is not None:
            self._reader.close()


def tracker_of(track: Any) -> Any:
    """The tracker that ``track_policy_version`` asks for, if any.

    Raises:
        TypeError: something else.
    """
    if isinstance(track, bool):
        return PolicyVersion() if track else None
    if not hasattr(track, "increment_version"):
        raise TypeError(
            f"track_policy_version: expected a bool or a PolicyVersion, got "
            f"{type(track).__name__}; pass True"
        )
    return track


def _weights_of(policy: Any, updater: Any) -> Any:
    """What a channel is made of, ``None`` if there are no weights."""
    if isinstance(policy, nn.Module) and any(True for _ in module_slots(policy)):
        return policy
    if policy is None and isinstance(updater, MultiProcessedRemoteWeightUpdate):
        return next(iter(updater._policy_weights.values()), None)
    return None


def _nothing() -> None:
    """The updater publishes by itself."""


class _Counted:
    """A post-hook that publishes the trainer's policy, which the updater has written.

    It does not keep the collector alive.
    """

    def __init__(self, collector: AsyncUpdates) -> None:
        self._collector = weakref.ref(collector)

    def __call__(self) -> None:
        collector = self._collector()
        if collector is None:
            return
        scheme = collector._weight_sync_schemes.get("policy")
        if scheme is None:
            collector.increment_version()
        else:
            scheme.send()
