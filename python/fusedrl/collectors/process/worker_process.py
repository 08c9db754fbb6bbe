"""The trainer's end of a worker process: starts it, talks to it, and ends it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from typing import Any, TypeVar

import cloudpickle

from fusedrl.collectors.process import messages, process_tree
from fusedrl.collectors.process.inbox import Awaited, Inbox, ReceivedBatch
from fusedrl.collectors.process.shared_batches import Mappings
from fusedrl.collectors.process.wire import Wire
from fusedrl.collectors.process.worker import main
from fusedrl.collectors.process.worker_errors import ShutDown
from fusedrl.collectors.process.worker_job import PackedJob

SHUTDOWN_S = 10.0
KILL_S = 1.0  # seconds that are added to the time in which a worker has to end by itself
LOOK_S = 10.0  # seconds of waiting, after which to check whether the worker is stopped

T = TypeVar("T")

logger = logging.getLogger("fusedrl")


class WorkerProcess:
    """A worker, which has been started; several threads may use it.

    Whatever Ctrl-C interrupts here can be repeated: requests name the number of the last batch that
    is wanted, a batch stays until the trainer has counted it, and calls are numbered.

    Args:
        context: the context of multiprocessing.
        packed: the job from which the worker makes its collector.

    Raises:
        TypeError: something in the job cannot be pickled.
    """

    def __init__(self, context: Any, packed: PackedJob) -> None:
        ours, theirs = socket.socketpair()
        self.process = context.Process(target=main, args=(theirs, packed), name="fusedrl-collector")
        try:
            with _undisturbed():
                self.process.start()
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            ours.close()
            raise TypeError(
                "create_env_fn, policy: expected what can be sent to another process, got "
                f"{error}; pass functions that make them there (policy_factory=)"
            ) from error
        finally:
            theirs.close()
        self._trainer, self.pid = os.getpid(), self.process.pid
        self._stopped = False
        self._asked = 0
        self._numbers = itertools.count(messages.READY + 1)
        self._inbox, self._outbox = Inbox(), queue.SimpleQueue()
        self._ready = Awaited(anew=False)
        self._inbox.expect(messages.READY, self._ready)
        self._link = _Link(self.process, Wire(ours), self._inbox, self._outbox)
        # This ends the worker before multiprocessing joins its children at exit, if nobody has.
        self._finalizer = Finalize(self, self._link.end, (SHUTDOWN_S,), exitpriority=100)

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the trainer, whose worker it is."""
        return self._trainer != os.getpid()

    def check(self) -> None:
        """Raise ``RuntimeError`` if the worker can no longer be used from this process."""
        if self._stopped:
            raise ShutDown
        if self.is_inherited:
            raise RuntimeError(
                "collector: expected the process that made it, got one that was forked from it; "
                "make another one here"
            )

    def ready(self) -> Any:
        """Wait until the worker has its collector; returns whether that uses buffers."""
        return self._answer_to(self._ready)

    def under_way(self, taken: int) -> int:
        """How many batches were requested beyond those that are taken."""
        return self._asked - max(taken, self._inbox.outdated)

    def ask(self, taken: int, ahead: int) -> None:
        """Request ``ahead`` batches after those that are taken."""
        last = max(taken, self._inbox.outdated) + ahead
        if last > self._asked:
            self._outbox.put(messages.More(last))
            self._asked = last  # if Ctrl-C comes before this, the same request is sent again

    def batch(self, taken: int, timeout: float | None) -> ReceivedBatch:
        """The first batch after those that are taken, which is kept until :meth:`drop`.

        Raises:
            TimeoutError: no batch arrives in time.
        """
        self.check()

        def look() -> ReceivedBatch | None:
            self.ask(taken, 1)  # a call of another thread may have outdated the requested batches
            return self._inbox.batch(taken)

        arrived = self._wait_for(look, timeout)
        if arrived is not None:
            return arrived
        remedy = "it is alive: raise timeout"
        if process_tree.is_stopped(self.pid):
            remedy = f"a signal has stopped it: let it go on with kill -CONT {self.pid}"
        raise TimeoutError(
            f"timeout: expected a batch of the worker (pid {self.pid}) within {timeout} s, got "
            f"none; {remedy}"
        )

    def is_outdated(self, number: int) -> bool:
        """Whether a call has made a batch outdated."""
        return number <= self._inbox.outdated

    def drop(self, taken: int) -> None:
        """Remove batches that are taken."""
        self.check()
        self._inbox.drop(taken)

    def set_version(self, version: Any) -> None:
        """Set the version of the worker's tracker, also while it collects."""
        self._send(messages.SetVersion(version))

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
        number, call = next(self._numbers), Awaited(anew)
        pickled = cloudpickle.dumps((function, args))
        self._inbox.expect(number, call)
        self._send(messages.Call(number, pickled))
        return self._answer_to(call)

    def _answer_to(self, call: Awaited) -> Any:
        answer = self._wait_for(lambda: call.answer, None)
        assert answer is not None
        if isinstance(answer, messages.Refusal):
            raise answer.failure.exception()
        return pickle.loads(answer.pickled)

    def _wait_for(self, look: Callable[[], T | None], timeout: float | None) -> T | None:
        """As :meth:`Inbox.wait_for`, with a warning if the worker is stopped by a signal."""
        left = float("inf") if timeout is None else timeout
        while (found := self._inbox.wait_for(look, min(left, LOOK_S))) is None and left > LOOK_S:
            left -= LOOK_S
            if process_tree.is_stopped(self.pid):
                logger.warning(
                    "AsyncCollector: waiting for the worker (pid %s), which a signal has stopped; "
                    "let it go on with kill -CONT %s",
                    *(self.pid, self.pid),
                )
        return found

    def _send(self, message: messages.Call | messages.SetVersion) -> None:
        if self._inbox.failure is not None:
            raise self._inbox.failure()
        self._outbox.put(message)

    def stop(self, timeout: float) -> None:
        """Let the worker end by itself within ``timeout`` seconds, or else kill it.

        It may be called again, also if the last call was interrupted.
        """
        self._stopped = True
        self._inbox.fail(ShutDown)
        self._link.end(timeout)
        self._inbox.clear()
        self._finalizer.cancel()


class _Link:
    """The threads that send and receive on a worker's wire.

    They have no reference to the collector, which may be freed without a shutdown.
    """

    def __init__(
        self,
        process: Any,
        wire: Wire,
        inbox: Inbox,
        outbox: queue.SimpleQueue[messages.ToWorker | None],
    ) -> None:
        self._process, self._wire = process, wire
        self._inbox, self._outbox = inbox, outbox
        self._mappings = Mappings()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"fusedrl-{name}")
            for name, target in (("read", self._read), ("write", self._write))
        ]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        # The thread that receives reports why the worker does not answer.
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                if isinstance(message, messages.More):
                    message = messages.More(message.last, self._mappings.released())
                self._wire.send(message)

    def _read(self) -> None:
        try:
            while (message := self._wire.receive(self._process)) is not None:
                self._take(message)
                del message  # it may be a batch, whose memory must not be kept
        except BaseException as error:
            self._inbox.fail(functools.partial(_unreadable, error))
        else:
            self._process.join(KILL_S)
            self._inbox.fail(functools.partial(_gone, self._process.pid, self._process.exitcode))

    def _take(self, message: messages.ToTrainer) -> None:
        match message:
            case messages.Batch():
                self._unpack(message)
            case messages.End(number):
                self._inbox.put(ReceivedBatch(number))
            case messages.Answer() | messages.Refusal():
                self._inbox.answer(message)
            case messages.Failed(failure):
                self._inbox.fail(failure.exception)

    def _unpack(self, batch: messages.Batch) -> None:
        try:
            unpacked = self._mappings.unpack(batch.shared)
            arrived = ReceivedBatch(batch.number, unpacked, batch.frames, batch.oldest)
        except Exception as error:
            arrived = ReceivedBatch(batch.number, error=error)
            self._process.join(KILL_S)  # the memory of a worker that was killed cannot be opened
            if not self._process.is_alive():
                return
        self._inbox.put(arrived)

    def end(self, timeout: float) -> None:
        """End the worker process and the threads."""
        process = self._process
        with contextlib.suppress(ValueError):  # the process object is closed already
            if process.is_alive():
                self._outbox.put(messages.Stop(timeout))
                process_tree.send(signal.SIGCONT, [process.pid])  # it may have been stopped
                process.join(timeout + KILL_S)
            if process.is_alive():
                process_tree.send(
                    signal.SIGKILL, [process.pid, *process_tree.descendants(process.pid)]
                )
                process.join()
            self._outbox.put(None)
            self._wire.hang_up()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    thread.join()
            self._wire.close()
            self._mappings.close()
            process.close()


def _unreadable(error: BaseException) -> RuntimeError:
    failure = RuntimeError(
        f"worker: expected messages that can be read, got {type(error).__name__}: {error}; shut "
        "the collector down and make another one"
    )
    failure.__cause__ = error
    return failure


def _gone(pid: int, code: int | None) -> RuntimeError:
    return RuntimeError(
        f"worker: expected process {pid} to collect, got its end with exit code {code}; its own "
        "output may say why (a script needs if __name__ == '__main__')"
    )


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Protect a process that is started in this block from Ctrl-C until it ignores it itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
