"""The process of an ``AsyncCollector``: a collector between a pipe and shared memory.

The main thread collects; another one reads the pipe, so that the trainer is heard, and its end
noticed, while a batch is collected.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torchrl

from fusedrl.collectors.policy_version import versions_in
from fusedrl.collectors.process.errors import Failure
from fusedrl.collectors.process.inner import make_collector
from fusedrl.collectors.process.sealed import Sealed
from fusedrl.collectors.process.shared_batches import Segments

ORPHANED_S = 3.0  # to end in, once the trainer is gone
POLL_S = 1.0


class Stop(BaseException):
    """Raised in the main thread, wherever it is, when the worker has to end."""


def main(connection: Connection, sealed: Sealed) -> None:
    """Collect what is asked for through ``connection``, until it is closed or says stop."""
    # Ctrl-C is sent to the trainer and its workers: the trainer says what it means for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    with warnings.catch_warnings():
        if torchrl.filter_warnings_subprocess:
            warnings.simplefilter("ignore")
        Worker(connection).run(sealed)
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
        connection: to the trainer.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._parents = os.getppid(), multiprocessing.parent_process()
        self._changed = threading.Condition()
        self._wanted = 0  # batches
        self._released: list[int] = []
        self._calls: deque[bytes] = deque()
        self._stopping = False
        self._interruptible = True
        self._segments = Segments()
        self._dated = False
        self._collector: Any = None

    def run(self, sealed: Sealed) -> None:
        """Make the collector, then collect and answer until the end."""
        signal.signal(signal.SIGTERM, self._interrupt)
        threading.Thread(target=self._listen, daemon=True, name="fusedrl-listen").start()
        try:
            job = sealed.open()
            torch.set_num_threads(job.threads)
            self._dated = job.dated
            self._collector = make_collector(job)
            self._send("ready", getattr(self._collector, "policy_version", None))
            batches = iter(self._collector)
            while (asked := self._next()) is not None:
                if asked:
                    self._answer(asked)
                else:
                    self._collect(batches)
        except Stop:
            pass
        except BaseException as error:  # also what a policy or a tool ends a program with
            self._send("error", Failure.of(error))
        finally:
            self._interruptible = False
            self._close()

    def _next(self) -> bytes | None:
        """A call, or nothing (``b""``) for a batch; ``None`` at the end."""
        with self._changed:
            while not self._stopping:
                if self._calls:
                    return self._calls.popleft()
                if self._wanted:
                    self._wanted -= 1
                    self._segments.release(self._released)
                    self._released = []
                    return b""
                self._changed.wait()
        return None

    def _collect(self, batches: Iterator[Any]) -> None:
        collector = self._collector
        before = getattr(collector, "_frames", 0)
        batch = next(batches, None)
        if batch is None:
            self._send("end")
            return
        frames = getattr(collector, "_frames", before + batch.numel()) - before
        watch = getattr(collector, "_watch", None)
        if watch is not None:
            watch.start()
        oldest = min(versions_in(batch)) if self._dated else None
        self._send("batch", self._segments.pack(batch), frames, oldest)
        if watch is not None:
            watch.lap("queueing")

    def _answer(self, call: bytes) -> None:
        try:
            function, args, kwargs = pickle.loads(call)
            value = pickle.dumps(function(self._collector, *args, **kwargs))
        except Exception as error:
            self._send("refused", Failure.of(error))
        else:
            self._send("answer", value)

    def _send(self, *message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the trainer is gone, which ends this process
            self._connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def _close(self) -> None:
        if self._collector is not None:
            with contextlib.suppress(Exception):
                self._collector.shutdown()
        self._segments.close()

    # What follows runs in the thread that reads the pipe.

    def _listen(self) -> None:
        timeout = ORPHANED_S
        while (message := self._receive()) is not None:
            kind, *rest = message
            if kind == "stop":
                timeout = rest[0]
                break
            self._take(kind, *rest)
        self._stop(timeout)

    def _receive(self) -> tuple[Any, ...] | None:
        """The next message; ``None`` once the trainer is gone."""
        pid, parent = self._parents
        alive: list[Any] = [self._connection] + ([parent.sentinel] if parent is not None else [])
        while True:
            ready = wait(alive, POLL_S)
            if self._connection in ready:
                try:
                    return pickle.loads(self._connection.recv_bytes())
                except (EOFError, OSError):
                    return None
            # A process that the trainer forked may keep its ends of the pipes open.
            if ready or os.getppid() != pid:
                return None

    def _take(self, kind: str, *rest: Any) -> None:
        if kind == "version":
            tracker = getattr(self._collector, "policy_version_tracker", None)
            if tracker is not None:
                tracker.version = rest[0]
            return
        with self._changed:
            if kind == "more":
                count, released = rest
                self._wanted += count
                self._released += released
            else:
                self._calls.append(rest[0])
            self._changed.notify()

    def _stop(self, timeout: float) -> None:
        """Interrupt the main thread, and end the process if that does not end it in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)
        time.sleep(timeout)
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    def _interrupt(self, *_: Any) -> None:
        if self._interruptible:
            self._interruptible = False
            raise Stop
