"""Keeps what has arrived from a worker, for the threads that wait for it.

Only one thread writes here, and no signal interrupts it. Ctrl-C may interrupt the others anywhere.
They therefore only look at what has arrived and take nothing out, so that nothing can be lost.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from fusedrl.collectors.process.messages import Answer, Refusal

T = TypeVar("T")


class ReceivedBatch(NamedTuple):
    """A batch with its number, counted from 1.

    ``frames`` is the number of frames that it counts as, ``oldest`` is its oldest version, if the
    trainer wants to know it, and ``error`` is what unpacking it raised. If there is neither a batch
    nor an error, the worker's collector has ended.
    """

    number: int
    batch: Any = None
    frames: int = 0
    oldest: int | None = None
    error: Exception | None = None

    @property
    def is_end(self) -> bool:
        """Whether there is no batch."""
        return self.batch is None and self.error is None


class Awaited:
    """A call that is running, and its ``answer`` once it has arrived.

    Args:
        anew: whether the call makes batches from before it outdated.
    """

    def __init__(self, anew: bool) -> None:
        self.anew = anew
        self.answer: Answer | Refusal | None = None


class Inbox:
    """Batches and answers of a worker, and what ended it.

    Attributes:
        failure: makes the exception that waiting threads raise, once the worker has ended.
        outdated: the last number of the batches that a call made outdated.
    """

    def __init__(self) -> None:
        self.failure: Callable[[], BaseException] | None = None
        self.outdated = 0
        self._batches: deque[ReceivedBatch] = deque()
        self._trimming = threading.Lock()
        self._calls: dict[int, Awaited] = {}
        self._waiting: set[queue.SimpleQueue[None]] = set()

    def expect(self, number: int, call: Awaited) -> None:
        """Note that a call is running; its answer is dropped if nobody waits for it any more."""
        self._calls[number] = call

    def batch(self, taken: int) -> ReceivedBatch | None:
        """The first batch after those that are taken, if it has arrived; it is not removed."""
        self.drop(taken)
        with self._trimming:
            return self._batches[0] if self._batches else None

    def drop(self, taken: int) -> None:
        """Remove batches that are taken or outdated."""
        with self._trimming:
            while self._batches and self._batches[0].number <= max(taken, self.outdated):
                self._batches.popleft()

    def clear(self) -> None:
        """Remove all batches."""
        with self._trimming:
            self._batches.clear()

    def wait_for(self, look: Callable[[], T | None], timeout: float | None) -> T | None:
        """Wait until ``look()`` finds something; ``None`` if it takes ``timeout`` seconds.

        Raises:
            BaseException: it finds nothing, and the worker has ended.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._waiting.add(wake)
            while (found := look()) is None:
                if self.failure is not None:
                    raise self.failure()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return None
                with suppress(queue.Empty):
                    wake.get(timeout=left)
            return found
        finally:
            self._waiting.discard(wake)

    # The next methods are called by the thread that reads.

    def put(self, arrived: ReceivedBatch) -> None:
        """Add a batch."""
        with self._trimming:
            self._batches.append(arrived)
        self._wake()

    def answer(self, answer: Answer | Refusal) -> None:
        """Give a call its answer."""
        call = self._calls.pop(answer.number)
        if call.anew and isinstance(answer, Answer):
            self.outdated = answer.made
            self.drop(answer.made)
        call.answer = answer
        self._wake()

    def fail(self, failure: Callable[[], BaseException]) -> None:
        """Let all waiting threads raise, unless there was a failure before."""
        self.failure = self.failure or failure
        self._wake()

    def _wake(self) -> None:
        for wake in list(self._waiting):
            wake.put(None)
