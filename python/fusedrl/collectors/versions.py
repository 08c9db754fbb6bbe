"""Gives each turn one version of the policy's weights, and counts versions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusedrl.channel.follow import Follower, Held

WAIT_S = 600.0  # seconds that an update waits for turns, and a turn for an update
POLL_S = 0.0005


class _Block:
    """A turn, or an update, that has the weights for itself until it is dropped."""

    __slots__ = ("__weakref__", "counted", "thread", "updates")

    def __init__(self, updates: bool) -> None:
        self.thread = threading.get_ident()
        self.updates = updates
        self.counted = False  # whether the version of the update has been


class Versions:
    """Gives each turn of a collector one version of the policy's weights, and its number.

    Weights come through a channel, with their number: a follower switches them between turns. Or
    somebody writes them into the policy, and each update is counted: turns and updates of different
    threads then exclude each other, and nobody who waits is overtaken by more than one of them.

    ``settle`` waits, for so many seconds at most, until environments that step beside the turns no
    longer compute with the policy; it returns whether they have ended.
    """

    def __init__(self) -> None:
        self.tracker: Any = None  # tags what the environment returns, if versions are tracked
        self.follower: Follower | None = None
        # Ends that, if the channel is the collector's own, beside which no weights come.
        self.close: Callable[[], None] | None = None
        self.settle: Callable[[float], bool] = lambda seconds: True
        self.patience = WAIT_S
        self._block: Callable[[], _Block | None] = lambda: None  # a reference to the one that runs
        # Whoever waits for its end has the first place, so that nobody who comes later overtakes.
        self._first_place = threading.Lock()
        self._counting = threading.Lock()

    def follow(
        self, follower: Follower, close: Callable[[], None] | None = None
    ) -> Callable[[bool], None]:
        """Let a follower of a channel bring the policy's weights; returns :meth:`leave`."""
        if self.follower is not None:
            raise ValueError(
                "weight_sync_schemes: expected one for the policy, got another for a part of it, "
                "and a turn has one version; use one for 'policy', which is all of it"
            )
        self.follower, self.close = follower, close
        return self.leave

    def leave(self, keeps: bool = True) -> None:
        """Stop following a channel. The policy keeps the version that it had last.

        Or it gets the trainer's own weights, under a number that no published ones have.
        """
        if self.follower is not None and not keeps and self.tracker is not None:
            self.tracker.version = (self.follower.reader.version or 0) + 1
        if self.close is not None:
            self.close()
        self.follower = self.close = None

    def call(self) -> Held:
        """Let the policy compute with one version in a block, the newest now.

        A block within another of the same thread is a part of it. It is given the version's number,
        ``None`` if versions are not tracked.
        """
        follower, tracker = self.follower, self.tracker
        call = Held(None, self._begin(updates=False)) if follower is None else follower.call()
        if tracker is None:
            return Held(None, call)
        if call.value not in (None, tracker.version):
            tracker.version = call.value
        return Held(tracker.version if call.value is None else call.value, call)

    @contextmanager
    def update(self, numbered: bool = False) -> Iterator[None]:
        """Write the policy's weights between two turns, and count one version.

        Updates within an update are a part of it. Nothing is counted if the weights are
        ``numbered``: they come with their version, which may be the current one. Where a scheme
        brings them through its channel, nobody waits either.
        """
        if self.close is not None:
            raise RuntimeError(
                "channel: expected weights to come through it, got others; publish them"
            )
        if self.follower is None:
            block = self._begin(updates=True)  # which this frame holds
            block.counted |= numbered
        yield
        self.count()

    def count(self) -> None:
        """Count a new version, once for an update, unless versions come from a channel."""
        if self.tracker is None or self.follower is not None:
            return
        with self._counting:
            block = self._own_block() or _Block(updates=False)
            if not block.counted:
                self.tracker.increment_version()
            block.counted = block.updates

    @property
    def newest(self) -> int | None:
        """The version that the next turn will have; ``None`` if versions are not tracked."""
        if self.tracker is None:
            return None
        published = None if self.follower is None else self.follower.reader.version
        return self.tracker.version if published is None else published

    def _own_block(self) -> _Block | None:
        block = self._block()
        return block if block is not None and block.thread == threading.get_ident() else None

    def _begin(self, updates: bool) -> _Block:
        """The block of this thread, or a new one, which nothing of another thread runs beside."""
        block = self._own_block()
        if block is not None:
            if updates and not block.updates:
                raise RuntimeError(
                    "weights: expected an update between two turns, got one from within a turn, "
                    "which would have two versions; update before or after the rollout, or from "
                    "another thread"
                )
            return block
        with self._first_place:
            deadline = time.monotonic() + self.patience
            while block is None and time.monotonic() < deadline:
                if self._block() is None:
                    block = _Block(updates)
                    self._block = weakref.ref(block)
                else:
                    time.sleep(POLL_S)
        if block is None or (updates and not self.settle(self.patience)):
            block = None  # which the traceback would keep
            update = "turn: expected the end of an update of the policy's weights"
            turn = "weights: expected the end of the turn that computes with the former ones"
            raise TimeoutError(
                f"{turn if updates else update} within {self.patience:.0f} s, got none; pass "
                "channel=, where turns and updates do not wait for each other"
            )
        return block
