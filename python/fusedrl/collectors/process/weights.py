"""Sets up, once, what publishes a worker's weights; each update is then sent by a scheme."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fusedrl.channel.tensors import weights_in
from fusedrl.collectors.process.options import AsyncOptions
from fusedrl.weights.collector import is_policy
from fusedrl.weights.sync_scheme import ChannelWeightSyncScheme
from fusedrl.weights.updaters import MultiProcessedRemoteWeightUpdate


class PublishedWeights:
    """The schemes that publish a worker's weights, or the updater or channel in their place.

    Args:
        collector: the collector that schemes and updaters refer to. It is not kept alive here.
        options: its arguments: schemes, an updater, or a channel that somebody else publishes. If
            there are no schemes, there is one for the policy.

    Attributes:
        schemes: the schemes that publish weights, by the name of their model.
        updater: the weight updater, if any.
    """

    def __init__(self, collector: Any, options: AsyncOptions) -> None:
        schemes: Any = options.weight_sync_schemes
        channel: Any = options.channel
        self._policy, self._tracker = collector.policy, collector.policy_version_tracker
        self._closed = False
        self._reader = None if channel is None else channel.open()
        self.schemes: dict[str, Any] = {} if schemes is None else schemes
        self._numbered: Any = self._reader  # what numbers the policy's versions, or the tracker
        self.updater: Any = None
        try:
            updater = _made(options.weight_updater)
            weights = _weights_of(self._policy, updater)
            if schemes is None and channel is None and weights is not None:
                scheme: Any = ChannelWeightSyncScheme()
                self.schemes["policy"] = scheme
                if weights is not self._policy:
                    scheme.init_on_sender(model_id="policy", weights=weights)
            for name, scheme in self.schemes.items():
                if not scheme.initialized_on_sender:
                    scheme.init_on_sender(model_id=name, context=collector)
                if not scheme.synchronized_on_sender:
                    scheme.connect()
                if is_policy(name):
                    self._numbered = self._numbered or scheme
            self.set_updater(updater, collector)
        except BaseException:
            self.close()
            raise

    @property
    def come_from_others(self) -> bool:
        """Whether somebody else publishes the weights, in a channel that is only read here."""
        return self._reader is not None

    def brought(self) -> list[Tensor]:
        """Tensors of the policy that the channel has, and that are not sent with the job."""
        scheme = self.schemes.get("policy")
        if scheme is None or not isinstance(self._policy, nn.Module):
            return []
        names = {*scheme.channel.layout.view_of, *scheme.buffers}
        return [place.tensor for place in weights_in(self._policy) if place.name in names]

    def set_updater(self, updater: Any, collector: Any) -> None:
        """Register an updater, or what a function makes, with the collector, or remove it."""
        if updater is not None:
            if self._reader is not None:
                raise RuntimeError(
                    "channel: expected weights to come through it, got an updater; publish them"
                )
            updater = _made(updater)
            publishes = isinstance(updater, MultiProcessedRemoteWeightUpdate)
            if publishes:
                self._lend_channel(updater)
            updater.register_collector(collector)
            if not publishes:
                updater.register_post_hook(self._publisher(collector))
        self.updater = updater

    def _lend_channel(self, updater: MultiProcessedRemoteWeightUpdate) -> None:
        """Let an updater that makes one version of each update publish it."""
        if "policy" not in self.schemes:
            raise ValueError(
                "weight_updater: expected a policy with weights for it, got none; pass policy="
            )
        updater.publish_with(self.schemes["policy"])

    def _publisher(self, collector: Any) -> Callable[[], None]:
        """A function that makes one version of what an updater has written to the policy."""
        scheme, reference = self.schemes.get("policy"), weakref.ref(collector)

        def publish() -> None:
            owner = reference()
            if owner is not None and scheme is not None:
                scheme.send()
            elif owner is not None:
                owner.increment_version()

        return publish

    @property
    def version(self) -> Any:
        """The newest published version; ``None`` if none is tracked."""
        if self._tracker is None:
            return None
        newest = None if self._numbered is None else self._numbered.version
        return self._tracker.version if newest is None else newest

    def count(self) -> Any:
        """Count a version and return it; ``None`` if none is tracked, or if a channel counts."""
        if self._tracker is None or self._numbered is not None:
            return None
        self._tracker.increment_version()
        return self._tracker.version

    def close(self) -> None:
        """Close the channels; the last version can still be read. May be called again."""
        if self._closed:
            return
        newest = self.version
        if self._tracker is not None and newest != self._tracker.version:
            self._tracker.version = newest
        self._closed, self._numbered = True, None  # a scheme may belong to another collector soon
        for scheme in self.schemes.values():
            scheme.shutdown()
        if self._reader is not None:
            self._reader.close()


def _made(updater: Any) -> Any:
    """An updater, or the one that a function makes."""
    return updater if updater is None or hasattr(updater, "register_collector") else updater()


def _weights_of(policy: Any, updater: Any) -> Any:
    """The weights to create a channel from; ``None`` if there are none."""
    if isinstance(policy, nn.Module) and any(True for _ in weights_in(policy)):
        return policy
    if policy is None and isinstance(updater, MultiProcessedRemoteWeightUpdate):
        return next(iter(updater.policy_weights.values()), None)
    return None
