"""The thread of a collector's ``start()``, which fills the replay buffer, and its error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger("fusedrl")


class Background:
    """A thread that takes one batch after the other, each of which goes into the buffer.

    Args:
        owner: the name of the collector, for the log.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False

    def start(self, batches: Callable[[], Iterator[Any]]) -> None:
        """Take what ``batches()`` yields, until the end or :meth:`stop`; one thread at a time."""
        if not self.is_running():
            self._error = None
            self._thread = threading.Thread(
                target=self._take, args=(batches,), daemon=True, name="fusedrl-fill"
            )
            self._thread.start()

    def _take(self, batches: Callable[[], Iterator[Any]]) -> None:
        try:
            for _ in batches():
                if self._stopping:
                    return
        except BaseException as error:
            if not self._stopping:  # otherwise it is that of a collector that ends
                logger.exception("%s: collecting in the background failed", self._owner)
                self._error = error

    def is_running(self) -> bool:
        """Whether the thread is taking batches."""
        return self._thread is not None and self._thread.is_alive()

    def is_current(self) -> bool:
        """Whether this is called in the thread."""
        return self._thread is threading.current_thread()

    def check(self) -> None:
        """Raise the error that ended the thread, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def refuse_others(self) -> None:
        """Raise ``RuntimeError`` if the thread runs and another one calls this."""
        if self.is_running() and not self.is_current():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )

    def stop(self) -> None:
        """Take no further batch."""
        self._stopping = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and not self.is_current():
            self._thread.join(timeout)
