"""Weight updates of a collector: each is one version, whichever way it comes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fusedrl.collectors.rollout import Rollout


class Updates(Rollout):
    """How :class:`fusedrl.LLMCollector` takes weights other than out of a channel."""

    _update: Update
    _counting: threading.Lock

    @property
    def weight_updater(self) -> Any:
        """The weight updater, if any; one that is set is registered with this collector."""
        return self._weight_updater

    @weight_updater.setter
    def weight_updater(self, value: Any) -> None:
        if value is not None:
            self._refuse_beside_channel()
            made = hasattr(value, "register_collector") and not isinstance(value, type)
            value = value if made else value()
            hooks = len(value.post_hooks)
            value.register_collector(self)
            if len(value.post_hooks) == hooks:  # else it counts versions itself
                value.register_post_hook(_Increment(self))
        self._weight_updater = value

    @property
    def policy_version(self) -> Any:
        """The version that the next call of the policy has, ``None`` if none is tracked.

        With a channel that is the newest published one.
        """
        tracker = self.policy_version_tracker
        newest = None if tracker is None or self._channel is None else self._channel.newest
        return getattr(tracker, "version", None) if newest is None else newest

    def set_weight_updater(self, weight_updater: Any) -> bool:
        """Set the weight updater; returns ``True``, as remote calls want an answer."""
        self.weight_updater = weight_updater
        return True

    def increment_version(self) -> None:
        """Count a new version of the policy; during an update, once for all of it."""
        if self.policy_version_tracker is None or self._update.depth:
            return
        with self._counting:
            self.policy_version_tracker.increment_version()

    @contextmanager
    def _one_update(self, numbered: bool = False) -> Iterator[None]:
        """One new version at the end, however many of those inside count one or set one.

        Args:
            numbered: the weights come with their version, which may be the one there is.
        """
        update = self._update
        outermost = not update.depth
        update.depth += 1
        update.numbered = numbered or (update.numbered and not outermost)
        try:
            yield
        finally:
            update.depth -= 1
        if outermost and not update.numbered:
            self.increment_version()

    def update_policy_weights_(self, *args: Any, **kwargs: Any) -> None:
        """Update the policy's weights, as torchrl's collectors do, and count one version.

        With a channel there is nothing to be done, the next call of the policy has the newest.
        """
        if self._channel is not None and not args and not kwargs:
            return
        self._refuse_beside_channel()
        with self._one_update():
            super().update_policy_weights_(*args, **kwargs)

    def receive_weights(self, *args: Any, **kwargs: Any) -> None:
        """Take weights, those given or those of the receiving schemes, and count one version."""
        if not args and not kwargs and getattr(self, "_receiver_schemes", None) is None:
            return
        self._refuse_beside_channel()
        with self._one_update():
            super().receive_weights(*args, **kwargs)

    def _receive_weights_scheme(self, model_version: int | None = None) -> None:
        with self._one_update(numbered=model_version is not None):
            super()._receive_weights_scheme(model_version=model_version)

    def _refuse_beside_channel(self) -> None:
        if self._channel is not None:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )


class Update(threading.local):
    """The update that a thread is in, if any; another thread's counts by itself.

    Attributes:
        depth: of updates one within the other.
        numbered: one of them came with its version.
    """

    depth = 0
    numbered = False


class _Increment:
    """A post-hook of an updater that does not keep the collector alive."""

    def __init__(self, collector: Updates) -> None:
        self._collector = weakref.ref(collector)

    def __call__(self) -> None:
        collector = self._collector()
        if collector is not None:
            collector.increment_version()
