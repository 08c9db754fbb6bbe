"""The standard output of a command, which tells of a write that failed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class CannotWrite(OSError):
    """Standard output takes no more: a full disk, a quota, a device that is gone."""


@contextmanager
def watched() -> Iterator[None]:
    """Raise :class:`CannotWrite` where standard output fails, be it caught on the way or not.

    What was written before is flushed at the end. A pipe that nobody reads stays the
    ``BrokenPipeError`` that it is.
    """
    given = sys.stdout
    if given is None:  # closed by the caller, who wants none
        yield
        return
    output: Any = _Watched(given)
    sys.stdout = output
    try:
        try:
            yield
        finally:
            output.flush()  # here rather than at exit, where an error could not be caught
            if output.failure is not None:  # argparse says nothing of it
                raise output.failure
    finally:
        sys.stdout = given


def drop() -> None:
    """Let what is still buffered go nowhere, or it would be the error of Python's last flush."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Watched:
    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.failure: CannotWrite | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failure = CannotWrite(*error.args)
            raise self.failure from error
