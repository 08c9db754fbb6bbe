"""The thread of ``start()``, which fills the replay buffer, and its error."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fusedrl.collectors.process.worker_errors import ShutDown

logger = logging.getLogger("fusedrl")


class BufferThread:
    """A thread that takes one batch after the other, each of which goes into the buffer."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopping = False

    def start(self, batches: Callable[[], Iterator[Any]]) -> None:
        """Take what ``batches()`` yields, until the end or :meth:`stop`; one thread at a time."""
        if not self.is_running():
            self._thread = threading.Thread(
                target=self._take, args=(batches,), daemon=True, name="fusedrl-fill"
            )
            self._thread.start()

    def _take(self, batches: Callable[[], Iterator[Any]]) -> None:
        try:
            for _ in batches():
                if self._stopping:
                    return
        except ShutDown:
            pass
        except BaseException as error:
            logger.exception("AsyncCollector: collecting in the background failed")
            self._error = error

    def is_running(self) -> bool:
        """Whether the thread is taking batches."""
        return self._thread is not None and self._thread.is_alive()

    def check(self) -> None:
        """Raise the error that ended the thread, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def refuse_others(self) -> None:
        """Raise ``RuntimeError`` if the thread runs and another one calls this."""
        if self.is_running() and self._thread is not threading.current_thread():
            raise RuntimeError(
                "collector: expected to be iterated or start()ed, got both; read the replay buffer"
            )

    def stop(self) -> None:
        """Take no further batch."""
        self._stopping = True

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
