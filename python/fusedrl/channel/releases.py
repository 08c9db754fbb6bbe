"""Releases that wait for a GPU, without anyone waiting for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

POLL_S = 0.0005


class Releases:
    """Release slots once their readers' computation has ended.

    A thread polls while something is pending, and ends with it.

    Args:
        release: called with a slot, from any thread.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._pending: list[tuple[int, Callable[[], bool]]] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._then: Callable[[], None] | None = None

    def add(self, slot: int, done: Callable[[], bool] | None) -> None:
        """Release ``slot`` when ``done()`` is true; now if it is, or ``None``."""
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
                ended = [entry for entry in self._pending if entry[1]()]
                self._pending = [entry for entry in self._pending if entry not in ended]
                for slot, _ in ended:
                    self._release(slot)
                if not self._pending:
                    self._thread = None
                    then = self._then
                    break
            time.sleep(POLL_S)
        if then is not None:
            then()

    def close(self, then: Callable[[], None]) -> None:
        """Call ``then()`` once nothing is pending: now, or from the thread that polls."""
        with self._lock:
            if self._pending:
                self._then = then
                return
        then()
