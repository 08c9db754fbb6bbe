"""The process of an ``AsyncCollector``: a collector between a wire and shared memory.

The main thread collects. A second one listens, so that the trainer is heard while a batch is
collected, and a third one waits for the trainer's end.
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

import torch
import torchrl

from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.process import kin
from fusedrl.collectors.process.errors import Failure
from fusedrl.collectors.process.inner import describe, make_collector
from fusedrl.collectors.process.sealed import Sealed
from fusedrl.collectors.process.shared_batches import Segments
from fusedrl.collectors.process.wire import POLL_S, Wire

ORPHANED_S = 1.0  # to end in, once the trainer is gone
READY = 0  # the number of the answer that there is a collector

logger = logging.getLogger("fusedrl")


class Stop(BaseException):
    """Raised in the main thread, wherever it is, when the worker has to end."""


def main(end: socket.socket, sealed: Sealed) -> None:
    """Collect what is asked for through a wire, until it is closed or says stop."""
    # Ctrl-C is sent to the trainer and its workers: the trainer says what it means for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        if torchrl.filter_warnings_subprocess:
            warnings.simplefilter("ignore")
        Worker(Wire(end)).run(sealed)
    # The first that a spawned process does at its exit; a forked one has none.
    atexit.register(_leave)


def _leave() -> None:
    """End the process where its interpreter would go on to take all modules apart: that is seconds.

    What others registered with atexit is called before.
    """
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)


class Worker:
    """A collector and what it was asked for.

    Args:
        wire: to the trainer.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changed = threading.Condition()
        self._made = self._wanted = 0  # batches
        self._released: list[int] = []
        self._calls: deque[tuple[int, bytes]] = deque()
        self._stopping = self._orphaned = False
        self._interruptible = True
        self._segments = Segments()
        self._dated = False
        self._collector: Any = None
        self._batches: Iterator[Any] | None = None

    def run(self, sealed: Sealed) -> None:
        """Make the collector, then collect and answer until the end."""
        try:
            signal.signal(signal.SIGTERM, self._interrupt)
            for name, target in (("listen", self._listen), ("watch", self._watch)):
                threading.Thread(target=target, daemon=True, name=f"fusedrl-{name}").start()
            self._work(sealed)
        except Stop:  # also where an error is being told: the trainer wants to hear no more
            pass
        finally:
            self._interruptible = False
            self._close()

    def _work(self, sealed: Sealed) -> None:
        try:
            job = sealed.open()
            torch.set_num_threads(job.threads)
            self._dated = job.dated
            self._collector = make_collector(job)
            self._answer(READY, pickle.dumps((describe, ())))
            while (asked := self._next()) is not None:
                if isinstance(asked, int):
                    self._collect(asked)
                else:
                    self._answer(*asked)
        except Stop:
            raise
        except BaseException as error:  # also what a policy or a tool ends a program with
            self._send("error", Failure.of(error))

    def _next(self) -> tuple[int, bytes] | int | None:
        """A call, or the number of a batch; ``None`` at the end."""
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
            self._batches = None  # another state may be loaded, from which it goes on
            self._send("end", number)
            return
        frames = getattr(collector, "_frames", before + batch.numel()) - before
        watch = getattr(collector, "_watch", None)
        if watch is not None:
            watch.start()
        oldest = min(versions_in(batch)) if self._dated else None
        self._send("batch", number, self._segments.pack(batch), frames, oldest)
        if watch is not None:
            watch.lap("queueing")

    def _answer(self, number: int, call: bytes) -> None:
        try:
            function, args = pickle.loads(call)
            value = pickle.dumps(function(self._collector, *args))
        except Exception as error:
            self._send("refused", number, self._made, Failure.of(error))
        else:
            self._send("answer", number, self._made, value)

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # the trainer is gone, which ends this process
            self._wire.send(*message)

    def _close(self) -> None:
        if self._collector is not None:
            with contextlib.suppress(Exception):
                self._collector.shutdown()
        self._segments.close()
        if self._orphaned:
            kin.send(signal.SIGKILL, kin.descendants(os.getpid()))

    def _interrupt(self, *_: Any) -> None:
        if self._interruptible:
            self._interruptible = False
            raise Stop

    # What follows runs in the threads that listen and watch.

    def _listen(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                self._take(*message)
        except BaseException as error:
            logger.exception("AsyncCollector: the worker ends, as it can hear its trainer no more")
            self._send("error", Failure.of(error))
        self._abandon()

    def _watch(self) -> None:
        """Wait for the end of the trainer.

        A process that it has forked may hold its ends of all pipes open.
        """
        trainer = multiprocessing.parent_process()
        assert trainer is not None and trainer.pid is not None
        parent = os.getppid()
        ends: list[Any] = [trainer.sentinel]
        # Some kernels, sandboxes and builds of Python have none.
        with contextlib.suppress(OSError, AttributeError):
            ends.append(os.pidfd_open(trainer.pid))
        while not wait(ends, POLL_S) and os.getppid() == parent:
            pass
        self._abandon()

    def _abandon(self) -> NoReturn:
        self._orphaned = True
        self._stop(ORPHANED_S)

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "stop":
            self._stop(rest[0])
        if kind == "version":
            tracker = getattr(self._collector, "policy_version_tracker", None)
            if tracker is not None:
                tracker.version = rest[0]
            return
        with self._changed:
            if kind == "more":
                last, released = rest
                self._wanted = max(self._wanted, last)
                self._released += released
            else:
                number, call = rest
                self._calls.append((number, call))
            self._changed.notify()

    def _stop(self, timeout: float) -> NoReturn:
        """Interrupt the main thread, and end the process if that does not end it in time."""
        self._stopping = True
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(timeout)
        kin.send(signal.SIGKILL, kin.descendants(os.getpid()))
        os._exit(1)
