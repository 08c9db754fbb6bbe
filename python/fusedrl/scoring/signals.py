"""Signals that end a process, turned into exceptions so that what is unfinished is removed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived, as :class:`KeyboardInterrupt` says of SIGINT."""

    def __init__(self, number: int) -> None:
        """``number`` is the signal's."""
        super().__init__(number)
        self.signal = signal.Signals(number)


@contextmanager
def raised() -> Iterator[None]:
    """SIGTERM and SIGHUP raise :class:`Terminated` in the main thread while the block runs.

    A signal that is ignored (``nohup``) or that has a handler keeps its way.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    with _handled(handle, lambda before: before == signal.SIG_DFL):
        yield


@contextmanager
def held() -> Iterator[None]:
    """A signal that ends the process waits until the block, which should be short, is done."""
    waiting: list[int] = []
    try:
        with _handled(lambda number, frame: waiting.append(number), _would_end):
            yield
    finally:
        for number in waiting[:1]:
            signal.raise_signal(number)


def _would_end(handler: Any) -> bool:
    return handler == signal.SIG_DFL or callable(handler)  # not ignored, not another language's


@contextmanager
def _handled(
    handler: Callable[[int, FrameType | None], None], replaces: Callable[[Any], bool]
) -> Iterator[None]:
    """``handler`` in place of those that ``replaces`` agrees to; only the main thread may do so."""
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
