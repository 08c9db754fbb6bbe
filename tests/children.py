"""Forked children of a test's process."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    """Locks that a thread has, which a child will not have."""
    taken, end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in locks:
            lock.acquire()
        taken.set()
        end.wait()
        for lock in locks:
            lock.release()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    try:
        yield
    finally:
        end.set()
        thread.join()


def in_child(run: Callable[[], object]) -> int:
    """How a forked child ends that calls ``run``: 0, or 1 if that raises."""
    child = os.fork()
    if child == 0:
        end_by_signals()
        try:
            run()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def end_by_signals() -> None:
    """Let signals end this child, one that hangs by SIGALRM after 20 seconds.

    Handlers of pytest and of libraries that other tests have imported, and the garbage of other
    tests, would run in it without the threads that they may wait for.
    """
    gc.disable()
    faulthandler.disable()
    for number in (signal.SIGSEGV, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(20)
