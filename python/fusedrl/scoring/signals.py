"""Signals that end a process become exceptions, so that unfinished files are removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; for SIGINT, Python raises :class:`KeyboardInterrupt`."""

    def __init__(self, number: int) -> None:
        """``number`` is that of the signal."""
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise :class:`Terminated` in the main thread while the block runs.

    A signal that is ignored (as by ``nohup``) or has a handler of its own is left alone.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    with _handled(handle, lambda before: before == signal.SIG_DFL):
        yield


@contextmanager
def held() -> Iterator[None]:
    """Delay signals that end the process until the end of the block, which should be short."""
    waiting: list[int] = []
    try:
        with _handled(lambda number, frame: waiting.append(number), _would_end):
            yield
    finally:
        for number in waiting[:1]:
            signal.raise_signal(number)


def _would_end(handler: Any) -> bool:
    # An ignored signal and a handler that is not Python's own are neither.
    return handler == signal.SIG_DFL or callable(handler)


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None], replaces: Callable[[Any], bool]
) -> Iterator[None]:
    """Install ``handler`` for signals whose handler ``replaces`` accepts, in the main thread."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    mine = [number for number, old in before.items() if replaces(old)]
    if threading.current_thread() is not threading.main_thread():
        mine = []
    try:
        for number in mine:
            signal.signal(number, handler)
        yield
    finally:
        for number in mine:
            signal.signal(number, before[number])
