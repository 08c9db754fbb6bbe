"""The worker process of an ``AsyncCollector``, which collects into shared memory.

The main thread collects. A second one receives the trainer's messages, also while a batch is
collected, and a third one waits for the trainer to end.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any, NoReturn

import cloudpickle
import torch
import torchrl

from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.process import messages, process_tree
from fusedrl.collectors.process.shared_batches import Segments
from fusedrl.collectors.process.wire import POLL_S, Wire
from fusedrl.collectors.process.worker_collector import make_collector, uses_buffers
from fusedrl.collectors.process.worker_errors import Failure
from fusedrl.collectors.process.worker_job import PackedJob

ORPHANED_S = 1.0  # seconds to end in, once the trainer is gone

logger = logging.getLogger("fusedrl")


class Interrupted(BaseException):
    """Raised in the main thread, wherever it is, when the worker has to end."""


def main(end: socket.socket, packed: PackedJob) -> None:
    """Collect what is requested through the socket ``end``, until it is closed or says stop."""
    # Ctrl-C goes to the trainer and its workers, and the trainer tells the workers what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        if torchrl.filter_warnings_subprocess:
            warnings.simplefilter("ignore")
        Worker(Wire(end)).run(packed)
    # A spawned process runs this first at its exit; a forked one does not run it.
    atexit.register(_leave)


def _leave() -> None:
    """End the process before the interpreter frees all modules, which takes seconds.

    Functions that others registered with atexit have run by then.
    """
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


class Worker:
    """Runs a collector for the trainer.

    Args:
        wire: the connection to the trainer.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changed = threading.Condition()
        self._made = self._wanted = 0  # numbers of batches
        self._released: list[int] = []
        self._calls: deque[messages.Call] = deque()
        self._stopping = self._orphaned = False
        self._interruptible = True
        self._segments = Segments()
        self._dated = False
        self._collector: Any = None
        self._batches: Iterator[Any] | None = None

    def run(self, packed: PackedJob) -> None:
        """Make the collector, then collect and answer until the end."""
        try:
            signal.signal(signal.SIGTERM, self._interrupt)
            for name, target in (("listen", self._listen), ("watch", self._watch)):
                threading.Thread(target=target, daemon=True, name=f"fusedrl-{name}").start()
            self._work(packed)
        except Interrupted:  # also while an error is sent: the trainer needs no answer then
            pass
        finally:
            self._interruptible = False
            self._close()

    def _work(self, packed: PackedJob) -> None:
        try:
            job = packed.unpack()
            torch.set_num_threads(job.threads)
            self._dated = job.dated
            self._collector = make_collector(job)
            self._answer(messages.Call(messages.READY, pickle.dumps((uses_buffers, ()))))
            while (asked := self._next()) is not None:
                if isinstance(asked, messages.Call):
                    self._answer(asked)
                else:
                    self._collect(asked)
        except Interrupted:
            raise
        except BaseException as error:  # also SystemExit, which a policy or a tool may raise
            self._send(messages.Failed(Failure.of(error)))

    def _next(self) -> messages.Call | int | None:
        """The next call, or the number of the next batch; ``None`` at the end."""
        with self._changed:
            while not self._stopping:
                if self._calls:
                    return self._calls.popleft()
                if self._made < self._wanted:
                    self._made += 1
                    self._segments.release(self._released)
                    self._released = []
                    return self._made
                self._changed.wait()
        return None

    def _collect(self, number: int) -> None:
        collector = self._collector
        before = getattr(collector, "_frames", 0)
        self._batches = self._batches or iter(collector)
        batch = next(self._batches, None)
        if batch is None:
            self._batches = None  # another state may be loaded, with which collecting goes on
            self._send(messages.End(number))
            return
        frames = getattr(collector, "_frames", before + batch.numel()) - before
        watch = getattr(collector, "_watch", None)
        if watch is not None:
            watch.start()
        oldest = min(versions_in(batch)) if self._dated else None
        self._send(messages.Batch(number, self._segments.pack(batch), frames, oldest))
        if watch is not None:
            watch.lap("queueing")

    def _answer(self, call: messages.Call) -> None:
        try:
            function, args = pickle.loads(call.pickled)
            value = cloudpickle.dumps(function(self._collector, *args))
        except Exception as error:
            self._send(messages.Refusal(call.number, Failure.of(error)))
        else:
            self._send(messages.Answer(call.number, self._made, value))

    def _send(self, message: messages.ToTrainer) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone, and this process will end
            self._wire.send(message)

    def _close(self) -> None:
        if self._collector is not None:
            with contextlib.suppress(Exception):
                self._collector.shutdown()
        self._segments.close()
        if self._orphaned:
            process_tree.send(signal.SIGKILL, process_tree.descendants(os.getpid()))

    def _interrupt(self, *_: Any) -> None:
        if self._interruptible:
            self._interruptible = False
            raise Interrupted

    # The next methods run in the threads that receive and watch.

    def _listen(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self._take(message)
        except BaseException as error:
            logger.exception("AsyncCollector: the worker ends, as it can hear its trainer no more")
            self._send(messages.Failed(Failure.of(error)))
        self._abandon()

    def _watch(self) -> None:
        """Wait for the end of the trainer.

        Pipes do not tell, because a process that the trainer has forked may keep their ends open.
        """
        trainer = multiprocessing.parent_process()
        assert trainer is not None and trainer.pid is not None
        parent = os.getppid()
        ends: list[Any] = [trainer.sentinel]
        # Some kernels, sandboxes and builds of Python have no pidfd_open.
        with contextlib.suppress(OSError, AttributeError):
            ends.append(os.pidfd_open(trainer.pid))
        while not wait(ends, POLL_S) and os.getppid() == parent:
            pass
        self._abandon()

    def _abandon(self) -> NoReturn:
        self._orphaned = True
        self._stop(ORPHANED_S)

    def _take(self, message: messages.ToWorker) -> None:
        match message:
            case messages.More(last, released):
                with self._changed:
                    self._wanted = max(self._wanted, last)
                    self._released += released
                    self._changed.notify()
            case messages.Call():
                with self._changed:
                    self._calls.append(message)
                    self._changed.notify()
            case messages.SetVersion(version):
                tracker = getattr(self._collector, "policy_version_tracker", None)
                if tracker is not None:
                    tracker.version = version
            case messages.Stop(timeout):
                self._stop(timeout)

    def _stop(self, timeout: float) -> NoReturn:
        """Interrupt the main thread, and end the process if that does not end it in time."""
        self._stopping = True
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(timeout)
        process_tree.send(signal.SIGKILL, process_tree.descendants(os.getpid()))
        os._exit(1)
