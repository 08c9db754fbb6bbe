"""Gives each turn one version of the policy's weights, and counts versions."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from fusedrl import _host
from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following
from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.policy_version import Version
from fusedrl.collectors.turn_gate import TurnGate
from fusedrl.weights.follow import (
    Unnumbered,
    check_counts,
    check_open,
    follow_channel,
    refuse_another_channel,
)


class Versions:
    """Gives each turn of a collector one version of the policy's weights, and its number.

    Weights come through a channel, with their number, or somebody writes them into the policy
    between two turns, and each update is counted.

    Attributes:
        tracker: the transform that tags what the environment returns, if versions are tracked.
        follower: what switches the policy's weights, if they come through a channel.
        gate: keeps other updates out of turns.
    """

    def __init__(self) -> None:
        self.tracker: Any = None
        self.follower: Following | None = None
        self.gate = TurnGate()
        self._close: Callable[[], None] | None = None
        self._update = _Update()
        self._unnumbered: Unnumbered | None = None
        self._counting = threading.Lock()
        renew_in_children(self, _counting=threading.Lock)

    def open(self, channel: WeightHandle | WeightReader, policy: Any, mode: Any) -> None:
        """Take the policy's weights from a channel, until :meth:`close`.

        Raises:
            ValueError: the channel does not have the weights of the policy.
        """
        follower, self._close = follow_channel(channel, policy, mode)
        self.follow(follower)

    def follow(self, follower: Following) -> None:
        """Let a follower of a channel bring the policy's weights.

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
        """Stop following a channel.

        Args:
            keeps: whether the policy keeps the version that it had last. Otherwise turns are
                refused until somebody counts a version of its new weights.
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

    def held(self, joins: bool = False) -> AbstractContextManager[Version | None]:
        """Let the policy compute with one version in a block: the newest now.

        Args:
            joins: whether the block is a part of a turn that runs, if one does.

        Returns:
            A context manager that gives the number of the version; ``None`` if versions are not
            tracked.

        Raises:
            RuntimeError: the policy's weights have no number, or the channel's reader is closed.
            TimeoutError: an update without a channel does not end.
        """
        if self._unnumbered is not None:
            self._unnumbered.check()
        if self.follower is None:
            return _host.Entered(self.gate.turn(joins), lambda _: self._tag(None))
        if self.is_open:
            check_open(self.follower.reader)
        # An object, which also ends where an interrupt comes before the block begins.
        return _host.Entered(self.follower, self._tag)

    def _tag(self, version: int | None) -> Version | None:
        """The number of the weights that are computed with, if versions are tracked."""
        if self.tracker is None:
            return None
        if version not in (None, self.tracker.version):
            self.tracker.version = version
        return self.tracker.version

    @property
    def newest(self) -> Version | None:
        """The version that the next turn will have; ``None`` if versions are not tracked."""
        if self.tracker is None:
            return None
        published = None if self.follower is None else self.follower.reader.version
        return self.tracker.version if published is None else published

    def count(self) -> None:
        """Count a new version, once for an update, unless versions come from a channel."""
        if self.tracker is None or self.follower is not None or self._update.depth:
            return
        with self._counting:
            self.tracker.increment_version()

    @contextmanager
    def one_update(self, numbered: bool = False, waits: bool = True) -> Iterator[None]:
        """Count one version at the end of the block, however many are counted or set inside.

        Args:
            numbered: whether the weights come with their version, which may be the current one.
            waits: whether the block writes weights that turns compute with, and therefore waits for
                the end of those that run, unless a follower switches these weights.

        Raises:
            RuntimeError: this thread is within a turn, for whose end the block would wait.
            TimeoutError: a turn does not end.
        """
        update = self._update
        outermost = not update.depth
        gate = self.gate.update() if waits and self.follower is None else nullcontext()
        with gate:
            update.depth += 1
            update.numbered = numbered or (update.numbered and not outermost)
            try:
                yield
            finally:
                update.depth -= 1
            if outermost and not update.numbered:
                self.count()

    def take_updates_of(self, updater: Any) -> None:
        """Make one version of each update of a weight updater, also if it is called itself.

        The updater keeps only a weak reference to this object.
        """
        this = weakref.ref(self)

        def between_turns(push: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            versions = this()
            if versions is None:
                return push(*args, **kwargs)
            with versions.one_update():
                return push(*args, **kwargs)

        for name in ("push_weights", "update_weights"):  # torchrl's name, and ours
            if hasattr(updater, name):
                push = getattr(updater, name)
                setattr(updater, name, partial(between_turns, push))


class _Update(threading.local):
    """The update that is running in a thread; those of other threads are counted separately.

    Attributes:
        depth: how many updates are nested.
        numbered: whether one of them came with its version.
    """

    depth = 0
    numbered = False
