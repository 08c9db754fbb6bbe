"""Gives each turn one version of the policy's weights, and counts versions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.channel.following import Following, Held
from fusedrl.collectors.policy_version import Version
from fusedrl.weights.follow import (
    check_counts,
    check_open,
    follow_channel,
    number_own,
    refuse_another_channel,
)

WAIT_S = 600.0  # seconds that an update waits for turns, and a turn for an update
POLL_S = 0.0005


class _Block:
    """A turn, or an update, that has the weights for itself until it is dropped.

    Attributes:
        thread: that it runs in.
        updates: whether it is an update.
        numbered: whether the weights of the update come with their version.
    """

    __slots__ = ("__weakref__", "numbered", "thread", "updates")

    def __init__(self, updates: bool) -> None:
        self.thread = threading.get_ident()
        self.updates = updates
        self.numbered = False


def _no_block() -> None:
    """No block goes on, as a reference to one that is gone says."""


class Versions:
    """Gives each turn of a collector one version of the policy's weights, and its number.

    Weights come through a channel, with their number: a follower switches them between turns. Or
    somebody writes them into the policy, and each update is counted: turns and updates of different
    threads then exclude each other, and nobody who waits is overtaken by more than one of them.

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
        self._block: Callable[[], _Block | None] = _no_block  # that goes on without a channel
        # Whoever waits for its end has the first place, so that nobody who comes later overtakes.
        self._first_place = threading.Lock()
        self._counting = threading.Lock()
        self.patience = WAIT_S

    def open(self, channel: WeightHandle | WeightReader, policy: Any, mode: Any) -> None:
        """Take the policy's weights from a channel, until :meth:`close`.

        Raises:
            ValueError: the channel does not have the weights of the policy.
        """
        follower, self._close = follow_channel(channel, policy, mode)
        self.follow(follower)

    def follow(self, follower: Following) -> Callable[[bool], None]:
        """Let a follower of a channel bring the policy's weights; returns :meth:`leave`.

        Raises:
            ValueError: versions are tracked as UUIDs, or another channel is followed.
        """
        if self.follower is not None:
            refuse_another_channel()
        if self.tracker is not None:
            check_counts(self.tracker)
        self.follower = follower
        self._tag(follower.version)
        return self.leave

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

    def held(self) -> Held:
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
        if self.follower is None:
            return self._alone(False, "turn: expected the end of an update of the policy's weights")
        turn = self.follower.call()
        turn.value = self._tag(turn.value)
        return turn

    def _alone(self, updates: bool, expected: str) -> Held:
        """A block that nothing of another thread runs beside, with the number of the weights."""
        block = self._own_block()
        if block is not None and updates and not block.updates:
            raise RuntimeError(
                "weights: expected an update between two turns, got one from within a turn, "
                "which would have two versions; update before or after the rollout, or from "
                "another thread"
            )
        if block is None:
            with self._first_place:
                deadline = time.monotonic() + self.patience
                while self._block() is not None:
                    if time.monotonic() > deadline:
                        raise self._late(expected)
                    time.sleep(POLL_S)
                block = _Block(updates)
                self._block = weakref.ref(block)
        return Held(self._tag(None), block)

    def _own_block(self) -> _Block | None:
        """The block of this thread that goes on."""
        block = self._block()
        return block if block is not None and block.thread == threading.get_ident() else None

    def _is_in_update(self) -> bool:
        block = self._own_block()
        return block is not None and block.updates

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
        if not self._is_in_update():
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
        is_part = self._is_in_update()
        with self.between_turns():
            block = self._own_block()  # none where a follower switches the weights
            if block is not None:
                block.numbered = numbered or block.numbered
            yield
            if not (is_part or (block is not None and block.numbered)):
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
