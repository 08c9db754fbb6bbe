"""The trainer's end of a worker process: starts it, talks to it, takes its batches, and ends it."""

from __future__ import annotations

import contextlib
import itertools
import math
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import cloudpickle
from torchrl.collectors.utils import split_trajectories

from fusedrl.collectors.batch_stream import SHUT_DOWN, Advance, BatchStream, Ready
from fusedrl.collectors.policy_version import mark_padding
from fusedrl.collectors.process import messages, process_tree
from fusedrl.collectors.process.shared_batches import Mappings
from fusedrl.collectors.process.worker import POLL_S, Job, main

SHUTDOWN_S = 10.0
KILL_S = 1.0  # seconds that are added to the time in which a worker has to end by itself


class Arrived(NamedTuple):
    """A batch, counted from 1, and the number of frames that it counts as; none at the end."""

    number: int
    batch: Any = None
    frames: int = 0


class Future:
    """A result that one thread waits for and another one sets.

    Ctrl-C may interrupt waiting anywhere, and it can be repeated. In the futures of Python's
    library it may leave a lock locked, which the thread that sets the result needs.
    """

    def __init__(self) -> None:
        self._set = False
        self._value: Any = None
        self._error: Callable[[], BaseException] | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self, value: Any = None, error: Callable[[], BaseException] | None = None) -> None:
        """Set the result, or what makes the exception; later calls change nothing."""
        if not self._set:
            self._value, self._error = value, error
            self._set = True
            with contextlib.suppress(RuntimeError):  # another thread has set it at the same time
                self._gate.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the result; whether there is one after ``timeout`` seconds."""
        if not self._set and self._gate.acquire(timeout=-1 if timeout is None else timeout):
            self._gate.release()  # for another thread that waits
        return self._set

    def result(self) -> Any:
        """The result, once it is set."""
        if self._error is not None:
            raise self._error()
        return self._value


class WorkerHandle:
    """A worker, which has been started: the source of its batches, and of answers to calls.

    Several threads may use it. Each batch and each call has a future, which a thread that receives
    sets, and all have the same error once the worker has ended. Ctrl-C loses nothing: a batch stays
    in its future until the trainer has taken it, and requests name the last batch that is wanted.

    Args:
        context: the context of multiprocessing.
        job: makes the worker's collector.

    Attributes:
        outdated: the last number of the batches that a call has made outdated.

    Raises:
        TypeError: something in the job cannot be pickled.
    """

    def __init__(self, context: Any, job: Job) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self.process = context.Process(target=main, args=(theirs, job), name="fusedrl-collector")
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
        self._trainer, self.pid = os.getpid(), self.process.pid
        self._stopped = False
        self._failure: Callable[[], BaseException] | None = None
        self._asked = self.outdated = 0
        self._batches: dict[int, Future] = {}
        self._calls: dict[int, Future] = {}
        self._numbers = itertools.count()
        self._mappings = Mappings()
        # Ctrl-C in the middle of a message would spoil all later ones, so that threads send and
        # receive. Neither waits for the other: both sides may send messages of any size.
        self._outbox: queue.SimpleQueue[messages.ToWorker | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"fusedrl-{name}")
            for name, target in zip(
                ("read", "write", "watch"), (self._read, self._write, self._watch), strict=True
            )
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the trainer, whose worker it is."""
        return self._trainer != os.getpid()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the worker can no longer be used from this process."""
        if self._stopped:
            raise RuntimeError(SHUT_DOWN)
        if self.is_inherited:
            raise RuntimeError(
                "collector: expected the process that made it, got one that was forked from it; "
                "make another one here"
            )

    def ask(self, taken: int, ahead: int) -> None:
        """Request ``ahead`` batches after those that are taken."""
        last = max(taken, self.outdated) + ahead
        if last > self._asked:
            self._outbox.put(messages.More(last))
            self._asked = last  # if Ctrl-C comes before this, the same request is sent again

    def batch(self, taken: int, timeout: float | None) -> Arrived:
        """Forget the batches that are taken, and wait for the next one, which stays until then.

        Raises:
            TimeoutError: it does not arrive within ``timeout`` seconds.
        """
        self.check()
        while True:
            number = max(taken, self.outdated) + 1
            self._forget_before(number)
            self.ask(taken, 1)
            future = self._future(self._batches, number)
            # A call of another thread may have made this batch outdated, before there was a future
            # that could be set, or while this waits.
            if number > self.outdated:
                arrived = self._result_of(future, timeout)
                if number > self.outdated:
                    return arrived

    def _forget_before(self, number: int) -> None:
        for key in [key for key in list(self._batches) if key < number]:
            self._batches.pop(key, None)

    def call(self, function: Callable[..., Any], *args: Any, anew: bool = False) -> Any:
        """Call ``function(collector, *args)`` in the worker, between batches.

        Args:
            function: a function of the worker's collector.
            args: further arguments.
            anew: whether the call makes batches from before it outdated.

        Raises:
            Exception: the function's exception, with the worker's traceback as its cause.
        """
        self.check()
        number = next(self._numbers)
        pickled = cloudpickle.dumps((function, args))
        future = self._future(self._calls, number)
        self._outbox.put(messages.Call(number, pickled, anew))
        return pickle.loads(self._result_of(future))

    def set_version(self, version: Any) -> None:
        """Set the version of the worker's tracker, also while it collects."""
        if self._failure is not None:
            raise self._failure()
        self._outbox.put(messages.SetVersion(version))

    def _future(self, futures: dict[int, Future], number: int) -> Future:
        future = futures.setdefault(number, Future())
        if self._failure is not None:
            future.set(error=self._failure)
        return future

    def _result_of(self, future: Future, timeout: float | None = None) -> Any:
        if not future.wait(timeout):
            raise TimeoutError(
                f"timeout: expected a batch of the worker (pid {self.pid}) within {timeout} s, got "
                "none; raise timeout, or let it go on if a signal has stopped it"
            )
        return future.result()

    def stop(self, timeout: float) -> None:
        """Let the worker end by itself within ``timeout`` seconds, or else kill it.

        It may be called again, also if the last call was interrupted.
        """
        self._stopped = True
        process = self.process
        with contextlib.suppress(ValueError):  # the process object is closed already
            if process.is_alive():
                self._outbox.put(messages.Stop(timeout))
                process_tree.send(signal.SIGCONT, [self.pid])  # it may have been stopped
                process.join(timeout + KILL_S)
            if process.is_alive():
                process_tree.send(signal.SIGKILL, [self.pid, *process_tree.descendants(self.pid)])
                process.join()
            self._outbox.put(None)
            self._hang_up()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
            self._connection.close()
            self._mappings.close()
            process.close()
        self._batches.clear()

    def _hang_up(self) -> None:
        """End all sending and waiting; what has arrived can still be read."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    # The next methods run in the threads that send, receive and watch.

    def _write(self) -> None:
        # The thread that receives reports why the worker does not answer.
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                if isinstance(message, messages.More):
                    message = replace(message, released=self._mappings.released())
                self._connection.send_bytes(pickle.dumps(message))

    def _watch(self) -> None:
        """Hang up once the worker has ended: one of its children may keep its end open.

        That child may keep the sentinel open too.
        """
        while not wait([self.process.sentinel], POLL_S) and self.process.is_alive():
            pass
        self._hang_up()

    def _read(self) -> None:
        failure: Callable[[], BaseException] = self._ended
        try:
            while (data := self._received()) is not None:
                self._take(pickle.loads(data))
        except BaseException as error:
            failure = partial(_unreadable, error)
        else:
            self.process.join(KILL_S)
        self._fail(failure)

    def _received(self) -> bytes | None:
        with contextlib.suppress(EOFError, OSError):
            return self._connection.recv_bytes()

    def _take(self, message: messages.ToTrainer) -> None:
        match message:
            case messages.Batch(number, None):
                self._future(self._batches, number).set(Arrived(number))
            case messages.Batch():
                self._unpack(message)
            case messages.Answer(number, result, outdated):
                self.outdated = max(self.outdated, outdated)
                self._forget_before(self.outdated + 1)
                call = self._calls.pop(number)
                if isinstance(result, messages.Failure):
                    call.set(error=result.exception)
                else:
                    call.set(result)
            case messages.Failure():
                self._fail(message.exception)

    def _unpack(self, message: messages.Batch) -> None:
        assert message.shared is not None
        future = self._future(self._batches, message.number)
        try:
            unpacked = self._mappings.unpack(message.shared)
            future.set(Arrived(message.number, unpacked, message.frames))
        except Exception as error:
            self.process.join(KILL_S)  # the memory of a worker that was killed cannot be opened
            if self.process.is_alive():
                raised = error  # the name ends with the block
                future.set(error=lambda: raised)

    def _fail(self, failure: Callable[[], BaseException]) -> None:
        """Let all that waits raise, unless there was a failure before."""
        self._failure = self._failure or failure
        for future in [*self._calls.values(), *self._batches.values()]:
            future.set(error=self._failure)

    def _ended(self) -> RuntimeError:
        if self._stopped:
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
        arrived = self._worker.batch(self.number, self._collector.timeout)
        if arrived.batch is None:
            self.number = arrived.number
            return None
        return arrived

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
        self._worker.ask(self.number, math.ceil(min(collector.prefetch, left)))

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


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Protect a process that is started in this block from Ctrl-C until it ignores it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
