"""Gives each turn one version of the policy's weights, and counts versions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from fusedrl import _host
from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following
from fusedrl.channel.forking import is_mine, renew_in_children
from fusedrl.collectors.policy_version import Version
from fusedrl.weights.follow import (
    check_counts,
    check_open,
    follow_channel,
    number_own,
    refuse_another_channel,
)

WAIT_S = 600.0  # seconds that an update waits for turns, and a turn for an update


class Versions:
    """Gives each turn of a collector one version of the policy's weights, and its number.

    Weights come through a channel, with their number: a follower switches them between turns. Or
    somebody writes them into the policy, and each update is counted: a turn and an update then hold
    one lock, which goes to whoever has waited longest.

    Attributes:
        tracker: the transform that tags what the environment returns, if versions are tracked.
        follower: what switches the policy's weights, if they come through a channel.
        settle: waits, for a number of seconds at most, until environments that step beside the
            turns no longer compute with the policy; returns whether they have ended.
        patience: seconds that an update waits for turns, and a turn for an update.
    """

    def __init__(self) -> None:
        self.tracker: Any = None
        self.follower: Following | None = None
        self.settle: Callable[[float], bool] = lambda seconds: True
        self._close: Callable[[], None] | None = None
        # Whoever waits for the lock has the first place, so that nobody who comes later overtakes.
        self._lock: Any = threading.RLock()  # an RLock knows which thread owns it
        self._first_place = threading.Lock()
        self._updates = False  # whether the owner of the lock is an update
        self._numbered = False  # whether the weights of that update come with their version
        self._counting = threading.Lock()
        self.patience = WAIT_S
        renew_in_children(
            self, _lock=threading.RLock, _first_place=threading.Lock, _counting=threading.Lock
        )

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
        self.follower = follower
        self._tag(follower.version)

    def leave(self, keeps: bool = True) -> None:
        """Stop following a channel.

        Args:
            keeps: whether the policy keeps the version that it had last. Otherwise it gets back the
                trainer's own weights, under a number that no published ones have.
        """
        follower, self.follower = self.follower, None
        if follower is not None and not keeps and self.tracker is not None:
            number_own(self.tracker, follower)

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

    def check(self) -> None:
        """Raise ``RuntimeError`` if the reader of the channel is closed; nothing has begun then."""
        if self.is_open and self.follower is not None:
            check_open(self.follower.reader)

    def held(self) -> AbstractContextManager[Version | None]:
        """Let the policy compute with one version in a block: the newest now.

        A block within another of the same thread is a part of it.

        Returns:
            A context manager that gives the number of the version; ``None`` if versions are not
            tracked.

        Raises:
            RuntimeError: as for :meth:`check`.
            TimeoutError: an update without a channel does not end.
        """
        self.check()
        if self.follower is not None:
            # An object, which also ends where an interrupt comes before the block begins.
            return _host.Entered(self.follower, self._tag)
        return self._alone(False, "turn: expected the end of an update of the policy's weights")

    def _alone(self, updates: bool, expected: str) -> _host.Entered:
        """Hold the lock in a block, which gives the number of the weights."""
        deadline = time.monotonic() + self.patience
        waiting: list[_host.Acquired] = []
        try:
            if not is_mine(self._lock):
                for lock in (self._first_place, self._lock):
                    waiting.append(_host.Acquired(lock, max(deadline - time.monotonic(), 0.0)))
                    if not waiting[-1].held:
                        raise self._late(expected)
                self._updates = updates
            elif updates and not self._updates:
                raise RuntimeError(
                    "weights: expected an update between two turns, got one from within a turn, "
                    "which would have two versions; update before or after the rollout, or from "
                    "another thread"
                )
            return _host.Entered(self._lock, lambda _: self._tag(None))
        finally:
            for lock in waiting:
                lock.release()

    def _late(self, expected: str) -> TimeoutError:
        return TimeoutError(
            f"{expected} within {self.patience:.0f} s, got none; pass channel=, where turns and "
            "updates do not wait for each other"
        )

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
        if not (self._updates and is_mine(self._lock)):
            self._count()

    def _count(self) -> None:
        if self.tracker is not None and self.follower is None:
            with self._counting:
                self.tracker.increment_version()

    @contextmanager
    def one_update(self, numbered: bool = False) -> Iterator[None]:
        """As :meth:`between_turns`, and count one version, however many are counted in the block.

        If weights come through a channel, which numbers them, nothing is counted.

        Args:
            numbered: whether the weights come with their version, which may be the current one.

        Raises:
            RuntimeError: the collector has opened a channel for its weights, or as for
                :meth:`between_turns`.
            TimeoutError: a turn does not end.
        """
        self.refuse_beside_channel()
        is_part = self._updates and is_mine(self._lock)
        with self.between_turns():
            self._numbered = numbered or (is_part and self._numbered)
            yield
            if not (is_part or self._numbered):
                self._count()

    @contextmanager
    def between_turns(self) -> Iterator[None]:
        """Write the policy's weights in a block, unless they come through a channel.

        Raises:
            RuntimeError: this thread is within a turn, for whose end the block would wait.
            TimeoutError: a turn does not end.
        """
        if self.follower is not None:  # it switches the weights between turns
            yield
            return
        expected = "weights: expected the end of the turn that computes with the former ones"
        with self._alone(True, expected):
            if not self.settle(self.patience):
                raise self._late(expected)
            yield

    def refuse_beside_channel(self) -> None:
        """Raise ``RuntimeError`` if :meth:`open` has a channel for the weights."""
        if self.is_open:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )

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
