"""Holds slots until a GPU has finished with them, without blocking any caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from fusedrl.channel.forking import renew_in_children

POLL_S = 0.0005


class Releases:
    """Holds slots until their readers' computation has ended.

    A thread polls for as long as there are any.
    """

    def __init__(self) -> None:
        self._pending: deque[tuple[Any, Callable[[], bool]]] = deque()
        # Re-entrant: the garbage collector may run while the lock is held, and release leases.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        # A forked child does not have the thread, and the leases belong to its parent.
        renew_in_children(self, _lock=threading.RLock, _pending=deque, _thread=lambda: None)
        self._then: Callable[[], None] | None = None

    def add(self, hold: Any, done: Callable[[], bool]) -> None:
        """Keep ``hold``, which releases its slot when it is dropped, until ``done()`` is true."""
        if done():
            return
        with self._lock:
            self._pending.append((hold, done))
            if self._thread is None:
                thread = threading.Thread(target=self._poll, daemon=True)
                thread.start()
                self._thread = thread

    def _poll(self) -> None:
        while True:
            with self._lock:
                for _ in range(len(self._pending)):
                    hold, done = self._pending.popleft()
                    if not done():
                        self._pending.append((hold, done))
                    del hold
                if not self._pending:
                    self._thread = None
                    then = self._then
                    break
            time.sleep(POLL_S)
        if then is not None:
            then()

    def close(self, then: Callable[[], None]) -> None:
        """Call ``then()`` once nothing is pending: at once, or from the thread that polls."""
        with self._lock:
            if self._pending:
                self._then = then
                return
        then()
