"""The trainer's side of a worker process: start, messages, batches and shutdown."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle

from fusedrl.collectors.process.messages import post, receive, unpickled
from fusedrl.collectors.process.shared_batches import Mappings
from fusedrl.collectors.process.worker import POLL_S, Job, main
from fusedrl.collectors.stream import SHUT_DOWN

SHUTDOWN_S = 10.0
KILL_S = 5.0  # time for a worker to end after it closed its socket


class WorkerHandle:
    """A worker process, with its batches and the answers to calls. Thread-safe.

    A background thread receives all messages and reaps the worker; waiting callers poll for its
    failure. Ctrl-C may lose a batch in transit.
    """

    def __init__(self, context: Any, job: Job) -> None:
        self._socket, self._worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._trainer = os.getpid()
        self._deadline = math.inf  # of the shutdown
        self._failure: Callable[[], BaseException] | None = None
        self._requested = self._received = 0  # numbers of batches
        self._batches: queue.SimpleQueue[tuple[Any, int | None]] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}  # by number of the call
        self._numbers = itertools.count()
        self._mappings = Mappings()
        self._released: list[int] = []  # segments not yet reported to the worker
        self._thread = threading.Thread(target=self._run, daemon=True, name="fusedrl-worker")
        ends = self._worker_socket, self._socket
        self.process = context.Process(target=main, args=(*ends, job), name="fusedrl-collector")

    def start(self) -> None:
        """Start the process; the caller must have arranged for :meth:`stop`."""
        try:
            self.process.start()
            self.pid = self.process.pid
            self._thread.start()
        except BaseException as error:
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a worker that has already started
            if not isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
                raise
            raise TypeError(
                "create_env_fn, policy: expected picklable objects, got "
                f"{error}; pass functions that make them in the worker (policy_factory=)"
            ) from error
        finally:
            self._worker_socket.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the trainer that started the worker."""
        return self._trainer != os.getpid()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the worker cannot be used from this process."""
        if self._deadline < math.inf:
            raise RuntimeError(SHUT_DOWN)
        if self.is_inherited:
            raise RuntimeError(
                "collector: expected the process that made it, got a fork of it; make another "
                "collector in this process"
            )

    def ask(self, ahead: int) -> None:
        """Request ``ahead`` batches beyond those already taken (or lost to Ctrl-C)."""
        last = self._received - self._batches.qsize() + ahead
        if last > self._requested:
            post(self._socket, "make", last)
            self._requested = last  # if Ctrl-C comes before this line, the request is repeated

    def batch(self, timeout: float | None) -> tuple[Any, int | None]:
        """Wait for the next batch; returns it with the frame count of its collector, if any.

        The batch is ``None`` at the end; raises ``TimeoutError`` after ``timeout`` seconds.
        """
        self.check()
        batch, frames = self._wait(self._batches, timeout, partial(self.ask, 1))
        if isinstance(batch, Exception):
            raise batch
        return batch, frames

    def call(
        self,
        function: Callable[..., Any],
        *args: Any,
        frames: int | None = None,
        waits: bool = True,
    ) -> Any:
        """Call ``function(collector, *args)`` in the worker, between batches.

        With ``frames`` the collector continues from this frame count, and earlier batches are
        dropped. Without ``waits`` the result is discarded.
        """
        self.check()
        number = next(self._numbers)
        answers = self._answers[number] = queue.SimpleQueue()
        try:
            post(self._socket, "call", number, cloudpickle.dumps((function, args)), frames)
            result: Any = self._wait(answers) if waits else None
        finally:
            self._answers.pop(number, None)
        if isinstance(result, partial):
            raise result()
        return result and pickle.loads(result)

    def _wait(
        self,
        arrivals: queue.SimpleQueue[Any],
        timeout: float | None = None,
        ask: Callable[[], None] = lambda: None,
    ) -> Any:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            ask()  # repeated: the thread puts a batch into the queue before it counts it
            failure = self._failure  # messages before it are already queued
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return arrivals.get(timeout=0.0 if failure else max(min(left, POLL_S), 0.0))
            if failure is not None:
                raise failure()
            if left <= 0:
                raise TimeoutError(
                    f"timeout: expected a batch of the worker (pid {self.pid}) within {timeout} s, "
                    "got none; raise timeout, or resume the process if a signal stopped it"
                )

    def stop(self, timeout: float) -> None:
        """Ask the worker to end, and kill it after ``timeout`` seconds.

        Idempotent; the worker also ends if Ctrl-C interrupts this call.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        while self._thread.is_alive():
            # The worker may be stopped by a signal, with a full socket.
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
                post(self._socket, flags=socket.MSG_DONTWAIT)
            if threading.current_thread() is self._thread:
                return  # called by the garbage collector in this thread
            if time.monotonic() > self._deadline + 2 * KILL_S:  # unpickling a batch hangs
                self._failure = self._ended
                self._kill()
                return
            time.sleep(0.01)
        self._socket.close()
        with contextlib.suppress(ValueError):  # Ctrl-C came before the thread started
            self.process.close()
        self._batches, self._mappings = queue.SimpleQueue(), Mappings()

    # The following methods run in the background thread.

    def _run(self) -> None:
        ends = select.poll()
        with contextlib.suppress(ValueError):  # closed: Ctrl-C came before the thread started
            ends.register(self._socket, select.POLLIN)
        ends.register(self.process.sentinel, select.POLLIN)
        try:
            while time.monotonic() < self._deadline:
                ready = dict(ends.poll(POLL_S * 1000))
                if self._socket.fileno() in ready:
                    (method, *arguments), descriptor = receive(self._socket)
                    getattr(self, method)(*arguments, *(() if descriptor is None else [descriptor]))
                # A child of the worker may keep its socket and the sentinel open.
                elif ready or not self.process.is_alive():
                    break
        except (EOFError, ConnectionError):
            pass
        except OSError as error:
            self._failure = partial(RuntimeError, f"collector: expected a message, got {error}")
            self.process.kill()
        finally:
            self.process.join(max(0.0, min(self._deadline - time.monotonic(), KILL_S)))
            if self.process.exitcode != 0:
                self._kill()
                self.process.join()
            self._failure = self._failure or self._ended

    def take(self, frames: int | None, shared: Any, descriptor: int | None = None) -> None:
        """Queue a batch, or the error of unpacking it."""
        try:
            batch = shared and self._mappings.unpack(shared, descriptor)
        except Exception as error:
            batch = error
        self._batches.put((batch, frames))
        self._received += 1  # after the put, or ask() could request one batch too many
        del batch
        self._released += self._mappings.released()
        # Do not block on a stopped worker; the next batch retries.
        with contextlib.suppress(OSError):
            post(self._socket, "make", 0, self._released, flags=socket.MSG_DONTWAIT)
            self._released = []

    def answer(self, number: int, result: bytes, anew: bool) -> None:
        """Deliver the pickled result of a call; ``anew`` drops all earlier batches."""
        with contextlib.suppress(queue.Empty):
            while anew:
                self._batches.get_nowait()
        self._answers.get(number, queue.SimpleQueue()).put(result)

    def fail(self, error: bytes, number: int | None = None) -> None:
        """Deliver the error of a call, or of the worker if ``number`` is ``None``."""
        if number is None:
            self._failure = partial(unpickled, error)
        else:
            self._answers.get(number, queue.SimpleQueue()).put(partial(unpickled, error))

    def _kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(OSError):  # children of its environment
            os.killpg(self.pid, signal.SIGKILL)

    def _ended(self) -> RuntimeError:
        if self._deadline < math.inf:
            return RuntimeError(SHUT_DOWN)
        return RuntimeError(
            f"worker: expected process {self.pid} to run, got exit code {self.process.exitcode}; "
            "see its output (a script must be a file with if __name__ == '__main__')"
        )
