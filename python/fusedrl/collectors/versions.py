"""Which version of the policy's weights a turn computes with, and how versions are counted."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.policy_version import Version
from fusedrl.weights.follow import (
    Unnumbered,
    check_counts,
    check_open,
    follow_channel,
    refuse_another_channel,
)


class Versions:
    """Gives each turn of a collector one version of the policy's weights, and its number.

    Weights come through a channel, with their number; or somebody writes them into the policy,
    and each update is counted.

    Attributes:
        tracker: the transform that tags what the environment returns, if versions are tracked.
        follower: what switches the policy's weights, if they come through a channel.
    """

    def __init__(self) -> None:
        self.tracker: Any = None
        self.follower: Following | None = None
        self._close: Callable[[], None] | None = None
        self._update = _Update()
        self._unnumbered: Unnumbered | None = None
        self._counting = threading.Lock()
        renew_in_children(self, _counting=threading.Lock)

    def open(self, channel: WeightHandle | WeightReader, policy: Any, mode: Any) -> None:
        """Take the policy's weights from a channel, until :meth:`close`.

        Raises:
            ValueError: they are not those of the policy.
        """
        follower, self._close = follow_channel(channel, policy, mode)
        self.follow(follower)

    def follow(self, follower: Following) -> None:
        """Take the policy's weights from what follows a channel.

        Raises:
            ValueError: versions are tracked as UUIDs, or another channel is followed.
        """
        if self.follower is not None:
            refuse_another_channel()
        if self.tracker is not None:
            check_counts(self.tracker)
        self.follower, self._unnumbered = follower, None
        self._tag(follower.version)

    def leave(self, keeps: bool = True) -> None:
        """Follow no channel any more.

        Args:
            keeps: the policy has the version that it had last. Otherwise turns are refused until
                somebody counts a version of the weights that it has instead.
        """
        self.follower = None
        if not keeps and self.tracker is not None:
            self._unnumbered = Unnumbered(self.tracker)

    def close(self) -> None:
        """End what :meth:`open` began."""
        if self._close is not None:
            self.leave()
            self._close()
            self._close = None

    @property
    def is_open(self) -> bool:
        """Whether :meth:`open` was called, and :meth:`close` not yet."""
        return self._close is not None

    @contextmanager
    def held(self) -> Iterator[Version | None]:
        """Compute with one version in this block, the newest when it begins.

        Yields:
            Its number, ``None`` where versions are not tracked.

        Raises:
            RuntimeError: the policy's weights have no number, or the channel's reader is closed.
        """
        if self._unnumbered is not None:
            self._unnumbered.check()
        if self.follower is None:
            yield None if self.tracker is None else self.tracker.version
            return
        if self.is_open:
            check_open(self.follower.reader)
        with self.follower as version:
            self._tag(version)
            yield None if self.tracker is None else self.tracker.version

    def _tag(self, version: int | None) -> None:
        if self.tracker is not None and version not in (None, self.tracker.version):
            self.tracker.version = version

    @property
    def newest(self) -> Version | None:
        """The version that the next turn has; ``None`` where versions are not tracked."""
        if self.tracker is None:
            return None
        published = None if self.follower is None else self.follower.reader.version
        return self.tracker.version if published is None else published

    def count(self) -> None:
        """Count a new version, unless they are a channel's; once for all of an update."""
        if self.tracker is None or self.follower is not None or self._update.depth:
            return
        with self._counting:
            self.tracker.increment_version()

    @contextmanager
    def one_update(self, numbered: bool = False) -> Iterator[None]:
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
            self.count()

    def count_each_update_of(self, updater: Any) -> None:
        """Count a version after each update of a weight updater.

        The updater does not keep this alive.
        """
        this = weakref.ref(self)

        def count() -> None:
            if (versions := this()) is not None:
                versions.count()

        updater.register_post_hook(count)


class _Update(threading.local):
    """The update that a thread is in, if any; another thread's counts by itself.

    Attributes:
        depth: of updates one within the other.
        numbered: one of them came with its version.
    """

    depth = 0
    numbered = False
