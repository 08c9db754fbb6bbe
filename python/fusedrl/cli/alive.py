"""A line from time to time, by which a log without a terminal shows that a command is at work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

EVERY = 30.0  # seconds


@contextmanager
def told(command: str, doing: Callable[[], str], *, terminal: bool) -> Iterator[None]:
    """Say every 30 seconds on stderr what the block is doing, and for how long it runs.

    Args:
        command: the name of the command, which begins the line.
        doing: says it; called in a thread.
        terminal: whether stderr is a terminal, which shows progress by itself and gets no line.
    """
    ended = threading.Event()
    start = time.monotonic()

    def tell() -> None:
        while not ended.wait(EVERY):
            passed = duration(time.monotonic() - start)
            with suppress(OSError, ValueError):  # whoever read stderr may be gone
                print(f"{command}: {doing()}, running for {passed}", file=sys.stderr, flush=True)

    if terminal:
        yield
        return
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def duration(seconds: float) -> str:
    """Seconds as a reader says them: ``40 s``, ``3 min 20 s``, ``2 h 5 min``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
