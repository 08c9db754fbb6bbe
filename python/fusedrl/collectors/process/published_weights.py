"""Publishes the weights that a worker computes with, and counts their versions."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fusedrl.channel.sources import module_places
from fusedrl.collectors.process.async_options import AsyncOptions
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import MultiProcessedRemoteWeightUpdate
from fusedrl.weights.worker_end import is_policy


class PublishedWeights:
    """Publishes weights for a worker, and gives each update a version.

    Args:
        options: the policy, schemes, updater, channel and tracker, as far as they were given.
        collector: the collector that schemes and updaters refer to. It is not kept alive here.

    Attributes:
        schemes: the schemes that publish weights, by the name of their model.
        updater: the weight updater, torchrl's or ours, if any.
    """

    def __init__(self, options: AsyncOptions, collector: Any) -> None:
        self._options = options
        self._closed = False
        self._reader = None if options.channel is None else options.channel.open()
        given = options.weight_sync_schemes
        self.schemes: dict[str, Any] = {} if given is None else given
        self.updater: Any = None
        try:
            updater = _made(options.weight_updater)
            weights = _weights_of(options.policy, updater)
            if given is None and self._reader is None and weights is not None:
                scheme: Any = ChannelWeightSyncScheme()
                self.schemes["policy"] = scheme
                if weights is not options.policy:
                    scheme.init_on_sender(model_id="policy", weights=weights)
            self._publish_first(collector)
            self.set_updater(updater, collector)
        except BaseException:
            self.close()
            raise

    def _publish_first(self, collector: Any) -> None:
        for name, scheme in self.schemes.items():
            if not scheme.initialized_on_sender:
                scheme.init_on_sender(model_id=name, context=collector)
            if not scheme.synchronized_on_sender:
                scheme.connect()

    @property
    def come_from_others(self) -> bool:
        """Whether somebody else publishes the weights, in a channel that is only read here."""
        return self._reader is not None

    def brought(self) -> list[Tensor]:
        """Tensors of the policy that the channel has, and that are not sent with the job."""
        scheme, policy = self.schemes.get("policy"), self._options.policy
        if scheme is None or not isinstance(policy, nn.Module):
            return []
        names = {*scheme.channel.layout.view_of, *scheme._buffers}
        return [place.tensor for place in module_places(policy) if place.name in names]

    def set_updater(self, updater: Any, collector: Any) -> None:
        """Register an updater, or what a function makes, with the collector; ``None`` removes it.

        Raises:
            RuntimeError: somebody else publishes the weights.
            ValueError: the policy has no weights, or the updater is for several workers.
        """
        if updater is not None:
            if self._reader is not None:
                raise RuntimeError(
                    "channel: expected weights to come through it, got an updater; publish them"
                )
            updater = _made(updater)
            hook = self._after_update(updater, collector)
            updater.register_collector(collector)
            updater.register_post_hook(hook)
        self.updater = updater

    def _after_update(self, updater: Any, collector: Any) -> Callable[[], None]:
        """A post-hook that makes one version of each update."""
        scheme = self.schemes.get("policy")
        if not isinstance(updater, MultiProcessedRemoteWeightUpdate):
            return _OneVersion(scheme, collector)
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

    def _numbered(self) -> Any:
        """The scheme or reader that numbers the policy's versions, if the tracker does not."""
        if self._reader is not None:
            return self._reader
        return next((scheme for name, scheme in self.schemes.items() if is_policy(name)), None)

    @property
    def version(self) -> Any:
        """The newest published version; ``None`` if none is tracked."""
        tracker = self._options.tracker
        if tracker is None:
            return None
        numbered = self._numbered()
        newest = None if numbered is None or self._closed else numbered.version
        return tracker.version if newest is None else newest

    def count(self) -> Any:
        """Count a version and return it; ``None`` if none is tracked, or if a channel counts."""
        tracker = self._options.tracker
        if tracker is None or self._numbered() is not None:
            return None
        tracker.increment_version()
        return tracker.version

    def restore(self, state: dict[str, Any], version: Any) -> Any:
        """Publish the policy's weights out of a worker's state, as one version.

        Args:
            state: the state of the worker, from which the policy's weights are removed.
            version: the version of these weights; the number in a channel is at least that.

        Returns:
            The version, if no channel has counted it, and ``None`` otherwise.
        """
        scheme = self.schemes.get("policy")
        if scheme is None:
            return version
        state.pop("policy_version", None)
        weights = state.pop("policy_state_dict", None)
        if weights is None:
            return version
        scheme.send(weights, version=max(version or 0, (scheme.version or 0) + 1))
        return None

    def close(self) -> None:
        """Close the channels; the last version can still be read. May be called again."""
        if self._closed:
            return
        tracker, newest = self._options.tracker, self.version
        if tracker is not None and newest != tracker.version:
            tracker.version = newest
        for scheme in self.schemes.values():
            scheme.shutdown()
        if self._reader is not None:
            self._reader.close()
        self._closed = True  # from here on, a scheme may belong to another collector


def _made(updater: Any) -> Any:
    """An updater, or the one that a function makes."""
    return updater if updater is None or hasattr(updater, "register_collector") else updater()


def _weights_of(policy: Any, updater: Any) -> Any:
    """The weights to create a channel from; ``None`` if there are none."""
    if isinstance(policy, nn.Module) and any(True for _ in module_places(policy)):
        return policy
    if policy is None and isinstance(updater, MultiProcessedRemoteWeightUpdate):
        return next(iter(updater._policy_weights.values()), None)
    return None


def _nothing() -> None:
    """Do nothing, because the updater publishes by itself."""


class _OneVersion:
    """A post-hook that publishes the trainer's policy after the updater has written it.

    It keeps only a weak reference to the collector.
    """

    def __init__(self, scheme: Any, collector: Any) -> None:
        self._scheme = scheme
        self._collector = weakref.ref(collector)

    def __call__(self) -> None:
        collector = self._collector()
        if collector is None:
            return
        if self._scheme is None:
            collector.increment_version()
        else:
            self._scheme.send()
