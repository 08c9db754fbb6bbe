"""Keeps updates that write a policy's weights in place out of the turns that compute with them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fusedrl.channel.forking import renew_in_children

WAIT_S = 600.0  # seconds that an update waits for turns, and a turn for an update


class RunningTurn:
    """A turn that runs; it also ends when nothing refers to it, as after Ctrl-C.

    Args:
        gate: lets updates in when it ends.
        thread: the thread in which the whole turn runs, if it runs in one.
    """

    def __init__(self, gate: TurnGate, thread: int | None) -> None:
        self.thread = thread
        self._gate = gate

    def release(self) -> None:
        """End the turn."""
        self._gate._end(self)


class TurnGate:
    """Turns run beside each other, and an update runs alone; who waits first goes first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: weakref.WeakSet[RunningTurn] = weakref.WeakSet()
        self._updating: int | None = None  # the thread that updates
        self._waiting: deque[object] = deque()
        renew_in_children(
            self,
            _changed=threading.Condition,
            _turns=weakref.WeakSet,
            _updating=lambda: None,
            _waiting=deque,
        )

    @contextmanager
    def turn(self, joins: bool = False) -> Iterator[None]:
        """Run a turn in this block, all of it in this thread.

        Args:
            joins: whether the block is a part of a turn that runs, if one does.

        Raises:
            TimeoutError: an update does not end.
        """
        turn = self.hold(joins, threading.get_ident())
        try:
            yield
        finally:
            turn.release()

    def hold(self, joins: bool = True, thread: int | None = None) -> RunningTurn:
        """Begin a turn, or join one that runs; the result ends it, in any thread."""
        turn = RunningTurn(self, thread)
        with self._changed:
            inside = (joins and len(self._turns) > 0) or self._updating == threading.get_ident()
            if not inside and (self._updating is not None or self._waiting):
                self._wait(
                    lambda: self._updating is None,
                    "turn: expected the end of an update of the policy's weights",
                )
            self._turns.add(turn)
        return turn

    def _end(self, turn: RunningTurn) -> None:
        with self._changed:
            self._turns.discard(turn)
            if self._waiting:
                self._changed.notify_all()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run an update in this block, while no turn runs.

        Raises:
            RuntimeError: this thread is within a turn.
            TimeoutError: a turn does not end.
        """
        me = threading.get_ident()
        if self._updating == me:
            yield
            return
        with self._changed:
            if any(turn.thread == me for turn in self._turns):
                raise RuntimeError(
                    "weights: expected an update between two turns, got one from within a turn, "
                    "which would have two versions; update before or after the rollout, or from "
                    "another thread"
                )
            if self._turns or self._updating is not None or self._waiting:
                self._wait(
                    lambda: self._updating is None and not self._turns,
                    "weights: expected the end of the turn that computes with the former ones",
                )
            self._updating = me
        try:
            yield
        finally:
            with self._changed:
                self._updating = None
                self._changed.notify_all()

    def _wait(self, is_free: Callable[[], bool], expected: str) -> None:
        """Wait until it is free and all who came before have begun."""
        place = object()
        self._waiting.append(place)
        try:
            if not self._changed.wait_for(
                lambda: self._waiting[0] is place and is_free(), timeout=WAIT_S
            ):
                raise TimeoutError(
                    f"{expected} within {WAIT_S:.0f} s, got none; pass channel=, where turns and "
                    "updates do not wait for each other"
                )
        finally:
            self._waiting.remove(place)
            self._changed.notify_all()  # the next may be free to begin, too
