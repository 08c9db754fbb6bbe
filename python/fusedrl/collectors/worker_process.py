"""A trainer's end of a worker process: what arrives from it, and how it ends."""

from __future__ import annotations

import contextlib
import functools
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from typing import Any

import cloudpickle

from fusedrl.collectors.sealed import Sealed
from fusedrl.collectors.worker import main

SHUTDOWN_S = 10.0
KILL_S = 1.0  # beyond the time in which a worker ends itself


class WorkerProcess:
    """A worker, which has been started; several threads may use it.

    Args:
        context: of multiprocessing.
        sealed: what the worker makes its collector of.

    Raises:
        TypeError: something in the job cannot be pickled.
    """

    def __init__(self, context: Any, sealed: Sealed) -> None:
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=main, args=(theirs, sealed), name="fusedrl-collector")
        try:
            with _undisturbed():
                self.process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            self._connection.close()
            raise TypeError(
                "create_env_fn, policy: expected what can be sent to another process, got "
                f"{error}; pass functions that make them there (policy_factory=)"
            ) from error
        finally:
            theirs.close()
        self._changed = threading.Condition()
        self._calling = threading.Lock()
        self._reading = False
        self._batches: deque[tuple[Any, ...]] = deque()
        self._answers: deque[tuple[Any, ...]] = deque()
        self._failure: Callable[[], Exception] | None = None
        # Before multiprocessing joins its children at exit, and if nobody shuts the worker down.
        end = self.process, self._connection, SHUTDOWN_S
        self._finalizer = Finalize(self, _end, end, exitpriority=100)

    def ready(self) -> Any:
        """Wait until there is a collector; returns its version."""
        return self._wait(self._answers, None)[1]

    def ask(self, count: int, released: list[int]) -> None:
        """Ask for further batches, and give memory of former ones back."""
        self._send("more", count, released)

    def batch(self, timeout: float | None) -> tuple[Any, ...] | None:
        """A shipment, its frames and oldest version; ``None`` if there will be no other."""
        message = self._wait(self._batches, timeout)
        return message[1:] or None

    def forget(self) -> list[tuple[Any, ...]]:
        """Batches that have arrived, which nobody will get."""
        with self._changed:
            lost = [message[1:] for message in self._batches if message[0] == "batch"]
            self._batches.clear()
        return lost

    def set_version(self, version: Any) -> None:
        """Let the worker's tracker have a version, also while it collects."""
        self._send("version", version)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What ``function(collector, *args, **kwargs)`` returns in the worker, between batches.

        Raises:
            Exception: what it raises, with the worker's traceback as its cause.
        """
        with self._calling:
            self._send("call", cloudpickle.dumps((function, args, kwargs)))
            kind, value = self._wait(self._answers, None)
        if kind == "refused":
            raise value.exception()
        return pickle.loads(value)

    def stop(self, timeout: float) -> None:
        """End the worker: by itself within ``timeout`` seconds, or else by force."""
        with self._changed:
            self._failure = self._failure or _closed
        if not self._finalizer.still_active():
            return
        self._finalizer.cancel()
        _end(self.process, self._connection, timeout)
        with self._changed:  # a thread that reads sees the end, too
            self._changed.wait_for(lambda: not self._reading, KILL_S)
        self._connection.close()
        self.process.close()

    def _send(self, *message: Any) -> None:
        if self._failure is not None:
            raise self._failure()
        try:
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        except OSError:
            self._wait(deque(), None)  # what the worker said last says why

    def _wait(self, arrived: deque[tuple[Any, ...]], timeout: float | None) -> tuple[Any, ...]:
        """The next of ``arrived``; one thread reads for all."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not arrived:
                if self._failure is not None:
                    raise self._failure()
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"timeout: expected an answer of the worker (pid {self.process.pid}) "
                        f"within {timeout} s, got none; it is alive: raise timeout"
                    )
                if self._reading:
                    self._changed.wait(left)
                    continue
                with self._alone():
                    message = self._read(left)
                self._sort(message)
            return arrived.popleft()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let other threads in, and none of them read."""
        self._reading = True
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()
            self._reading = False
            self._changed.notify_all()

    def _read(self, timeout: float | None) -> tuple[Any, ...]:
        ready = wait([self._connection, self.process.sentinel], timeout)
        if not ready:
            return ("nothing",)
        # A worker that has ended may have said something before.
        if self._connection in ready or self._connection.poll():
            with contextlib.suppress(EOFError, OSError):
                return pickle.loads(self._connection.recv_bytes())
        return ("dead",)

    def _sort(self, message: tuple[Any, ...]) -> None:
        kind = message[0]
        if kind in ("batch", "end"):
            self._batches.append(message)
        elif kind in ("ready", "answer", "refused"):
            self._answers.append(message)
        elif self._failure is None and kind == "error":
            self._failure = message[1].exception
        elif self._failure is None and kind == "dead":
            self.process.join(KILL_S)
            self._failure = functools.partial(
                RuntimeError,
                f"worker: expected process {self.process.pid} to collect, got its end with exit "
                f"code {self.process.exitcode}; its own output may say why (a script needs "
                "if __name__ == '__main__')",
            )


def _closed() -> RuntimeError:
    return RuntimeError(
        "collector: expected one that runs, got one that was shut down; make another one"
    )


def _end(process: Any, connection: Connection, timeout: float) -> None:
    """Ask a worker to end, and see to it that it does."""
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(("stop", timeout)))
    process.join(timeout + KILL_S)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """A process that is started here is not sent Ctrl-C before it can ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
