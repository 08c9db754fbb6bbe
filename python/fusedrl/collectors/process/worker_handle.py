"""The trainer's end of a worker process: starts it, talks to it, takes its batches, and ends it."""

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
KILL_S = 5.0  # seconds in which a worker that has hung up has to end


class WorkerHandle:
    """A worker: the source of its batches, and of answers to calls.

    Any thread may use it. One of its own receives everything and sees to the worker's end; those
    who wait look from time to time whether that has come. Ctrl-C may lose the batch that it meets.
    """

    def __init__(self, context: Any, job: Job) -> None:
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._trainer = os.getpid()
        self._deadline = math.inf  # until when the worker has to end
        self._failure: Callable[[], BaseException] | None = None
        self._asked = self._received = 0  # numbers of batches
        self._batches: queue.SimpleQueue[tuple[Any, int | None]] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}  # by the numbers of calls
        self._numbers = itertools.count()
        self._mappings = Mappings()
        self._released: list[int] = []  # segments of which the worker was not told yet
        self._thread = threading.Thread(target=self._run, daemon=True, name="fusedrl-worker")
        ends = self._theirs, self._socket
        self.process = context.Process(target=main, args=(*ends, job), name="fusedrl-collector")

    def start(self) -> None:
        """Start the process. Whoever calls this has seen to :meth:`stop` before."""
        try:
            self.process.start()
            self.pid = self.process.pid
            self._thread.start()
        except BaseException as error:
            self._socket.shutdown(socket.SHUT_RDWR)  # what has begun ends
            if not isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
                raise
            raise TypeError(
                "create_env_fn, policy: expected what can be sent to another process, got "
                f"{error}; pass functions that make them there (policy_factory=)"
            ) from error
        finally:
            self._theirs.close()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the trainer, whose worker it is."""
        return self._trainer != os.getpid()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the worker can no longer be used from this process."""
        if self._deadline < math.inf:
            raise RuntimeError(SHUT_DOWN)
        if self.is_inherited:
            raise RuntimeError(
                "collector: expected the process that made it, got one that was forked from it; "
                "make another one here"
            )

    def ask(self, ahead: int) -> None:
        """Request ``ahead`` batches after those that are taken, or that Ctrl-C has lost."""
        last = self._received - self._batches.qsize() + ahead
        if last > self._asked:
            post(self._socket, "make", last)
            self._asked = last  # if Ctrl-C comes before this, the same request is sent again

    def batch(self, timeout: float | None) -> tuple[Any, int | None]:
        """Wait for the next batch, and take it with the count of its collector, if it counts.

        The batch is ``None`` at the end; ``TimeoutError`` after ``timeout`` seconds.
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

        After a call with ``frames`` the worker begins anew: its collector goes on from this count,
        and batches from before are dropped. Without ``waits`` the result is lost.
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
            ask()  # again, as the thread counts a batch after it has put it where it is taken
            failure = self._failure  # all that came before it has arrived
            left = deadline - time.monotonic()
            with contextlib.suppress(queue.Empty):
                return arrivals.get(timeout=0.0 if failure else max(min(left, POLL_S), 0.0))
            if failure is not None:
                raise failure()
            if left <= 0:
                raise TimeoutError(
                    f"timeout: expected a batch of the worker (pid {self.pid}) within {timeout} s, "
                    "got none; raise timeout, or let it go on if a signal has stopped it"
                )

    def stop(self, timeout: float) -> None:
        """Let the worker end by itself within ``timeout`` seconds, or else kill it.

        It may be called again. After Ctrl-C the worker ends all the same.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        while self._thread.is_alive():
            # It may have been stopped by a signal, and the socket be full for as long.
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)
                post(self._socket, flags=socket.MSG_DONTWAIT)
            if threading.current_thread() is self._thread:
                return  # it collects garbage, and goes on
            if time.monotonic() > self._deadline + 2 * KILL_S:  # a batch takes for ever to unpickle
                self._failure = self._ended
                self._kill()
                return
            time.sleep(0.01)
        self._socket.close()
        with contextlib.suppress(ValueError):  # Ctrl-C came before the thread, and it ends alone
            self.process.close()
        self._batches, self._mappings = queue.SimpleQueue(), Mappings()

    # What follows runs in the thread.

    def _run(self) -> None:
        ends = select.poll()
        with contextlib.suppress(ValueError):  # Ctrl-C came before the thread: it is closed
            ends.register(self._socket, select.POLLIN)
        ends.register(self.process.sentinel, select.POLLIN)
        try:
            while time.monotonic() < self._deadline:
                ready = dict(ends.poll(POLL_S * 1000))
                if self._socket.fileno() in ready:
                    (method, *arguments), descriptor = receive(self._socket)
                    getattr(self, method)(*arguments, *(() if descriptor is None else [descriptor]))
                # A child of the worker may keep its end of the socket open, and the sentinel.
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
        """Put a batch where it is taken, or the error of unpacking it."""
        try:
            batch = shared and self._mappings.unpack(shared, descriptor)
        except Exception as error:
            batch = error
        self._batches.put((batch, frames))
        self._received += 1  # last, or ask() might ask for one too many
        del batch
        self._released += self._mappings.released()
        # This thread must not wait for a worker that is stopped; the next batch tells it.
        with contextlib.suppress(OSError):
            post(self._socket, "make", 0, self._released, flags=socket.MSG_DONTWAIT)
            self._released = []

    def answer(self, number: int, result: bytes, anew: bool) -> None:
        """Hand out the pickled result of a call; ``anew`` drops all batches from before it."""
        with contextlib.suppress(queue.Empty):
            while anew:
                self._batches.get_nowait()
        self._answers.get(number, queue.SimpleQueue()).put(result)

    def fail(self, error: bytes, number: int | None = None) -> None:
        """Hand out the error of a call, or what has ended the worker."""
        if number is None:
            self._failure = partial(unpickled, error)
        else:
            self._answers.get(number, queue.SimpleQueue()).put(partial(unpickled, error))

    def _kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(OSError):  # what its environment has started
            os.killpg(self.pid, signal.SIGKILL)

    def _ended(self) -> RuntimeError:
        if self._deadline < math.inf:
            return RuntimeError(SHUT_DOWN)
        return RuntimeError(
            f"worker: expected process {self.pid} to collect, got its end with exit code "
            f"{self.process.exitcode}; its own output may say why (a script has to be a file, with "
            "if __name__ == '__main__')"
        )
