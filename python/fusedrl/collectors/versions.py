"""Pin one version of the policy's weights for each turn, and count versions."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fusedrl.channel.follow import Follower, Held

WAIT_S = 600.0  # longest wait of an update for a turn, and of a turn for an update
POLL_S = 0.0005


class _WeightAccess:
    """Exclusive access of a turn or an update to the weights, until this object is freed."""

    __slots__ = ("__weakref__", "counted", "thread", "updates")

    def __init__(self, updates: bool) -> None:
        self.thread = threading.get_ident()
        self.updates = updates
        self.counted = False  # whether the version of the update was counted


class Versions:
    """Pins one version of the policy's weights for each turn of a collector.

    With a channel, a follower switches weights between turns, and versions come from the channel.
    Otherwise updates write into the policy and are counted; turns and updates of different threads
    then exclude each other, and a waiting thread is overtaken by at most one other.

    ``settle(seconds)`` waits until environments that step concurrently no longer use the policy,
    and returns whether they ended in time.
    """

    def __init__(self) -> None:
        self.tracker: Any = None  # the PolicyVersion, if versions are tracked
        self.follower: Follower | None = None
        # Stops following the channel= argument; with it, other updates are refused.
        self.close: Callable[[], None] | None = None
        self.settle: Callable[[float], bool] = lambda seconds: True
        self.patience = WAIT_S
        self._current: Callable[[], _WeightAccess | None] = lambda: (
            None
        )  # weak reference to the current one
        # Held by the first waiting thread, so that later ones do not overtake it.
        self._first_in_line = threading.Lock()
        self._counting = threading.Lock()

    def follow(
        self, follower: Follower, close: Callable[[], None] | None = None
    ) -> Callable[[bool], None]:
        """Use a follower of a channel for the policy's weights; returns :meth:`leave`."""
        if self.follower is not None:
            raise ValueError(
                "weight_sync_schemes: expected one scheme for the policy, got another for a part "
                "of it, but a turn has one version; use one scheme for 'policy'"
            )
        self.follower, self.close = follower, close
        return self.leave

    def leave(self, keeps: bool = True) -> None:
        """Stop following a channel.

        With ``keeps`` the policy keeps its weights and version; otherwise the version becomes
        greater than all published ones, for weights that the caller sets.
        """
        if self.follower is not None and not keeps and self.tracker is not None:
            self.tracker.version = (self.follower.reader.version or 0) + 1
        if self.close is not None:
            self.close()
        self.follower = self.close = None

    def call(self) -> Held:
        """Context that pins the newest version; its value is the version if versions are tracked.

        A nested block in the same thread uses the version of the outer block.
        """
        follower, tracker = self.follower, self.tracker
        call = Held(None, self._acquire(updates=False)) if follower is None else follower.call()
        if tracker is None:
            return Held(None, call)
        if call.value not in (None, tracker.version):
            tracker.version = call.value
        return Held(tracker.version if call.value is None else call.value, call)

    @contextmanager
    def update(self, numbered: bool = False) -> Iterator[None]:
        """Context for writing the policy's weights between two turns; counts one version.

        Nested updates count once, and ``numbered`` weights, which come with their version, do not
        count. An update through the channel of a scheme does not wait for turns.
        """
        if self.close is not None:
            raise RuntimeError(
                "channel: expected weights through it, got an update by other means; publish them"
            )
        if self.follower is None:
            block = self._acquire(updates=True)  # kept alive by this frame
            block.counted |= numbered
        yield
        self.count()

    def count(self) -> None:
        """Count a new version, once for each update, unless versions come from a channel."""
        if self.tracker is None or self.follower is not None:
            return
        with self._counting:
            block = self._access_of_thread() or _WeightAccess(updates=False)
            if not block.counted:
                self.tracker.increment_version()
            block.counted = block.updates

    @property
    def newest(self) -> int | None:
        """The version of the next turn; ``None`` if versions are not tracked."""
        if self.tracker is None:
            return None
        published = None if self.follower is None else self.follower.reader.version
        return self.tracker.version if published is None else published

    def _access_of_thread(self) -> _WeightAccess | None:
        block = self._current()
        return block if block is not None and block.thread == threading.get_ident() else None

    def _acquire(self, updates: bool) -> _WeightAccess:
        """The block of this thread, or a new one that excludes those of other threads."""
        block = self._access_of_thread()
        if block is not None:
            if updates and not block.updates:
                raise RuntimeError(
                    "weights: expected an update between two turns, got one within a turn, which "
                    "would mix two versions; update before or after the rollout, or from another "
                    "thread"
                )
            return block
        with self._first_in_line:
            deadline = time.monotonic() + self.patience
            while block is None and time.monotonic() < deadline:
                if self._current() is None:
                    block = _WeightAccess(updates)
                    self._current = weakref.ref(block)
                else:
                    time.sleep(POLL_S)
        if block is None or (updates and not self.settle(self.patience)):
            block = None  # or the traceback would keep it alive
            update = "turn: expected a weight update to end"
            turn = "weights: expected the turn with the previous version to end"
            raise TimeoutError(
                f"{turn if updates else update} within {self.patience:.0f} s, got a timeout; "
                "pass channel=, with which turns and updates do not wait for each other"
            )
        return block
