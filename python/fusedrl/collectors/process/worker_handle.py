"""The trainer's end of a worker process: starts it, talks to it, takes its batches, and ends it."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import cloudpickle
from torchrl.collectors.utils import split_trajectories

from fusedrl.collectors.batch_stream import SHUT_DOWN, Advance, BatchStream, Ready
from fusedrl.collectors.policy_version import mark_padding
from fusedrl.collectors.process import messages
from fusedrl.collectors.process.messages import post, receive
from fusedrl.collectors.process.shared_batches import Mappings
from fusedrl.collectors.process.worker import POLL_S, Job, main

SHUTDOWN_S = 10.0
KILL_S = 1.0  # seconds in which a worker that has hung up has to end


class Arrived(NamedTuple):
    """A batch, counted from 1, and the number of frames that it counts as; none at the end."""

    number: int
    batch: Any = None
    frames: int = 0


class WorkerHandle:
    """A worker, which has been started: the source of its batches, and of answers to calls.

    Several threads may use it. One of its own receives everything, and sees to the worker's end.
    Who waits looks from time to time whether the worker has failed. Ctrl-C breaks off no message;
    it may lose a batch that is being taken.

    Args:
        context: the context of multiprocessing.
        job: makes the worker's collector.

    Attributes:
        outdated: the last number of the batches that a call has made outdated.

    Raises:
        TypeError: something in the job cannot be pickled.
    """

    def __init__(self, context: Any, job: Job) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._trainer = os.getpid()
        self._deadline = math.inf  # until when the worker has to end
        self._over = False
        self._failure: Callable[[], BaseException] | None = None
        self._asked = self._received = self.outdated = 0  # numbers of batches
        self._batches: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self._numbers = itertools.count()
        self._mappings = Mappings()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fusedrl-worker")
        self.process = context.Process(
            target=main, args=(theirs, self._socket, job), name="fusedrl-collector"
        )
        try:
            self.process.start()
            self.pid = self.process.pid
            self._thread.start()
        except BaseException as error:
            self._socket.shutdown(socket.SHUT_RDWR)  # it ends if it was started
            self._socket.close()
            if not isinstance(error, (TypeError, AttributeError, pickle.PicklingError)):
                raise
            raise TypeError(
                "create_env_fn, policy: expected what can be sent to another process, got "
                f"{error}; pass functions that make them there (policy_factory=)"
            ) from error
        finally:
            theirs.close()

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
            self._post(messages.More(last))
            self._asked = last  # if Ctrl-C comes before this, the same request is sent again

    def batch(self, timeout: float | None) -> Arrived:
        """Wait for the next batch, and take it.

        Raises:
            TimeoutError: it does not arrive within ``timeout`` seconds.
        """
        self.check()
        while True:
            self.ask(1)
            arrived = self._wait(self._batches, timeout)
            if arrived.number <= self.outdated:
                continue
            if isinstance(arrived.batch, Exception):
                raise arrived.batch
            return arrived

    def call(self, function: Callable[..., Any], *args: Any, anew: bool = False) -> Any:
        """Call ``function(collector, *args)`` in the worker, between batches.

        Args:
            function: a function of the worker's collector.
            args: further arguments.
            anew: whether the call makes batches from before it outdated.

        Raises:
            Exception: the function's exception, with the worker's traceback as its cause.
        """
        number = next(self._numbers)
        answers = self._calls[number] = queue.SimpleQueue()
        try:
            self.tell(function, *args, anew=anew, number=number)
            result = self._wait(answers)
        finally:
            self._calls.pop(number, None)
        if isinstance(result, messages.Failure):
            raise result.exception()
        return pickle.loads(result)

    def tell(
        self, function: Callable[..., Any], *args: Any, anew: bool = False, number: int = -1
    ) -> None:
        """As :meth:`call`, without waiting for an answer, which has this number."""
        self.check()
        if self._failure is not None:
            raise self._failure()
        self._post(messages.Call(number, cloudpickle.dumps((function, args)), anew))

    def _post(self, message: messages.ToWorker) -> None:
        with contextlib.suppress(ConnectionError):  # who waits for an answer is told why
            post(self._socket, message)

    def _wait(self, arrivals: queue.SimpleQueue[Any], timeout: float | None = None) -> Any:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            failure = self._failure  # what came before it has arrived
            seconds = min(POLL_S, deadline - time.monotonic())
            with contextlib.suppress(queue.Empty):
                return arrivals.get(timeout=0.0 if failure else max(seconds, 0.0))
            if failure is not None:
                raise failure()
            if seconds <= 0:
                raise TimeoutError(
                    f"timeout: expected a batch of the worker (pid {self.pid}) within {timeout} s, "
                    "got none; raise timeout, or let it go on if a signal has stopped it"
                )

    def stop(self, timeout: float) -> None:
        """Let the worker end by itself within ``timeout`` seconds, or else kill it.

        It may be called again, also if the last call was interrupted.
        """
        self._deadline = min(self._deadline, time.monotonic() + timeout)
        if not self._over:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGCONT)  # it may have been stopped
            try:
                post(self._socket, messages.Stop(), flags=socket.MSG_DONTWAIT)
            except BlockingIOError:  # the socket is full
                self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                pass
        if threading.current_thread() is self._thread:  # which collects garbage, and goes on then
            return
        while not self._over:
            time.sleep(0.01)  # Ctrl-C may leave a thread that is joined marked as ended
        self._socket.close()
        self.process.close()
        self._mappings.close()
        self._batches = queue.SimpleQueue()

    # The next methods run in the thread.

    def _run(self) -> None:
        failure: Callable[[], BaseException] = self._ended
        try:
            while time.monotonic() < self._deadline:
                ready = wait([self._socket, self.process.sentinel], POLL_S)
                if self._socket in ready:
                    self._take(*receive(self._socket))
                # A child of the worker may hold its end of the socket open, and the sentinel.
                elif ready or not self.process.is_alive():
                    break
        except (EOFError, ConnectionError):
            pass
        except BaseException as error:
            failure = partial(_unreadable, error)
        self.process.join(max(0.0, min(self._deadline - time.monotonic(), KILL_S)))
        if self.process.exitcode != 0:  # what its environment has started ends too
            self.process.kill()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.join()
        self._failure = self._failure or failure
        self._over = True

    def _take(self, message: messages.ToTrainer, descriptor: int | None) -> None:
        match message:
            case messages.Batch(number, shared, frames):
                batch = None if shared is None else self._unpacked(shared, descriptor)
                self._batches.put(Arrived(number, batch, frames))
                self._received = number  # last, or ask() might ask for one too many
                del batch
                if released := self._mappings.released():
                    self._post(messages.Released(released))
            case messages.Answer(number, result, outdated):
                self.outdated = max(self.outdated, outdated)
                if (answers := self._calls.get(number)) is not None:
                    answers.put(result)
            case messages.Failure():
                self._failure = message.exception

    def _unpacked(self, shared: Any, descriptor: int | None) -> Any:
        """A batch, or the error that is raised where it is taken."""
        try:
            return self._mappings.unpack(shared, descriptor)
        except Exception as error:
            return error

    def _ended(self) -> RuntimeError:
        if self._deadline < math.inf:
            return RuntimeError(SHUT_DOWN)
        return RuntimeError(
            f"worker: expected process {self.pid} to collect, got its end with exit code "
            f"{self.process.exitcode}; its own output may say why (a script has to be a file, with "
            "if __name__ == '__main__')"
        )


class WorkerBatches(BatchStream):
    """The batches of a worker, as its collector's attributes say at the time.

    Args:
        worker: the process.
        collector: as for :class:`BatchStream`.

    Attributes:
        number: the number that the worker gave to the batch that was taken last.
    """

    counter = "AsyncCollector.stale_frames"

    def __init__(self, worker: WorkerHandle, collector: Any) -> None:
        super().__init__(collector, None)
        self._worker = worker
        self.number = 0

    def prepare(self, advance: Advance) -> Ready | None:
        """As for :class:`BatchStream`, but for a batch that a call has made outdated."""
        if self.number <= self._worker.outdated:
            self.forget()
        return super().prepare(advance)

    def _wait(self) -> Arrived | None:
        if self.frames >= self._collector.total_frames:
            return None
        arrived = self._worker.batch(self._collector.timeout)
        return None if arrived.batch is None else arrived

    def _count(self, arrived: Arrived) -> bool:
        if arrived.number <= self._worker.outdated:
            return False
        self.number = arrived.number
        self.frames += arrived.frames
        self.batches += 1
        return True

    def _request(self) -> None:
        collector = self._collector
        if collector.update_at_each_batch:
            collector.update_policy_weights_()
        left = (collector.total_frames - self.frames) / (collector.requested_frames_per_batch or 1)
        self._worker.ask(math.ceil(min(collector.prefetch, left)))

    def _finished(self, batch: Any) -> Any:
        collector = self._collector
        if collector.replay_buffer is None and collector.split_trajs:
            batch = mark_padding(split_trajectories(batch, prefix="collector"))
        batch = super()._finished(batch)
        if self.buffer is not None:
            batch.names = None
        return batch


def _unreadable(error: BaseException) -> RuntimeError:
    failure = RuntimeError(
        f"worker: expected messages that can be read, got {type(error).__name__}: {error}; shut "
        "the collector down and make another one"
    )
    failure.__cause__ = error
    return failure
