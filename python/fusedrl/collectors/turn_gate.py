"""Keeps updates that write a policy's weights in place out of the turns that compute with them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

from fusedrl.channel.forking import renew_in_children

WAIT_S = 600.0  # seconds that an update waits for turns, and a turn for an update
POLL_S = 0.5  # in which a waiting thread sees what ended because nothing referred to it


class Entry:
    """A turn or an update, waiting or running; it also ends when nothing refers to it.

    An interrupt may come at any point, and leaves nobody who waits for what is gone. As a context
    manager it ends with its block.

    Args:
        gate: lets others in when this one ends.
        thread: the thread in which all of it runs, if it runs in one.
        number: says who came before whom.
    """

    def __init__(self, gate: TurnGate, thread: int | None, number: int) -> None:
        self.thread, self.number = thread, number
        self._gate = gate

    def release(self) -> None:
        """End it."""
        self._gate._end(self)

    def __enter__(self) -> Entry:
        """This, which has begun."""
        return self

    def __exit__(self, *error: object) -> None:
        """End it."""
        self.release()


class _Sync:
    def __init__(self) -> None:
        # Taken by itself: a condition takes it in Python, where an interrupt would leave it taken.
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)


class TurnGate:
    """Turns run beside each other, and an update runs alone; who waits first goes first."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: WeakSet[Entry] = WeakSet()
        self._turns: WeakSet[Entry] = WeakSet()
        self._updates: WeakSet[Entry] = WeakSet()  # one at most
        self._sync = _Sync()
        renew_in_children(self, _waiting=WeakSet, _turns=WeakSet, _updates=WeakSet, _sync=_Sync)

    def turn(self, joins: bool = False) -> Entry:
        """Run a turn in a ``with`` block, all of it in this thread.

        Args:
            joins: whether the block is a part of a turn that runs, if one does.

        Raises:
            TimeoutError: an update does not end.
        """
        return self.hold(joins, threading.get_ident())

    def hold(self, joins: bool = True, thread: int | None = None) -> Entry:
        """Begin a turn, or join one that runs; the result ends it, in any thread."""
        turn = Entry(self, thread, next(self._numbers))
        try:
            with self._sync.lock:
                if not ((joins and self._turns) or self._is_updating()):
                    self._wait(
                        turn,
                        lambda: not self._updates,
                        "turn: expected the end of an update of the policy's weights",
                    )
                self._turns.add(turn)
            return turn
        except BaseException:  # whoever keeps it keeps this turn, too
            self._end(turn)
            raise

    def update(self) -> Entry:
        """Run an update in a ``with`` block, while no turn runs.

        Raises:
            RuntimeError: this thread is within a turn.
            TimeoutError: a turn does not end.
        """
        me = threading.get_ident()
        update = Entry(self, me, next(self._numbers))
        if self._is_updating():  # the block is a part of that update, which ends later
            return update
        try:
            self._begin(update)
            return update
        except BaseException:
            self._end(update)
            raise

    def _begin(self, update: Entry) -> None:
        with self._sync.lock:
            if any(turn.thread == update.thread for turn in self._turns):
                raise RuntimeError(
                    "weights: expected an update between two turns, got one from within a turn, "
                    "which would have two versions; update before or after the rollout, or from "
                    "another thread"
                )
            self._wait(
                update,
                lambda: not self._updates and not self._turns,
                "weights: expected the end of the turn that computes with the former ones",
            )
            self._updates.add(update)

    def _is_updating(self) -> bool:
        """Whether this thread is within an update."""
        me = threading.get_ident()
        return any(update.thread == me for update in self._updates)

    def _end(self, entry: Entry) -> None:
        with self._sync.lock:
            self._turns.discard(entry)
            self._updates.discard(entry)
            self._sync.changed.notify_all()

    def _wait(self, entry: Entry, is_free: Callable[[], bool], expected: str) -> None:
        """Wait until it is free and all who came before have begun."""
        deadline = time.monotonic() + WAIT_S
        self._waiting.add(entry)
        try:
            while not (is_free() and entry.number <= min(other.number for other in self._waiting)):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"{expected} within {WAIT_S:.0f} s, got none; pass channel=, where turns "
                        "and updates do not wait for each other"
                    )
                self._sync.changed.wait(min(left, POLL_S))
        finally:
            self._waiting.discard(entry)
            self._sync.changed.notify_all()  # the next may be free to begin, too
