"""Releases slots once a GPU has finished with them, without blocking any caller."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from fusedrl.channel.forking import renew_in_children

POLL_S = 0.0005


class Releases:
    """Releases slots once their readers' computation has ended.

    A thread polls for as long as releases are pending.

    Args:
        release: called with a slot, from any thread.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._pending: deque[tuple[int, Callable[[], bool]]] = deque()
        # Re-entrant: the garbage collector may run while the lock is held, and release leases.
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        # A forked child does not have the thread, and the leases belong to its parent.
        renew_in_children(self, _lock=threading.RLock, _pending=deque, _thread=lambda: None)
        self._then: Callable[[], None] | None = None

    def add(self, slot: int, done: Callable[[], bool] | None) -> None:
        """Release ``slot`` once ``done()`` is true, or at once if ``done`` is ``None``."""
        if done is None or done():
            self._release(slot)
            return
        with self._lock:
            self._pending.append((slot, done))
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, daemon=True)
                self._thread.start()

    def _poll(self) -> None:
        while True:
            with self._lock:
                for _ in range(len(self._pending)):
                    slot, done = self._pending.popleft()
                    if done():
                        self._release(slot)
                    else:
                        self._pending.append((slot, done))
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
