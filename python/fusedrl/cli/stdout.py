"""A standard output that raises an error of its own where a write fails."""

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
    """Raise :class:`CannotWrite` at the end of the block if any write to standard output failed.

    Libraries such as argparse catch the ``OSError`` of a write and go on, so that a failure is
    remembered. The output is flushed at the end, and a pipe that nobody reads raises
    ``BrokenPipeError`` as it does elsewhere.
    """
    given = sys.stdout
    if given is None:  # the caller closed it, and wants no output
        yield
        return
    output: Any = _Watched(given)
    sys.stdout = output
    try:
        try:
            yield
        finally:
            output.flush()  # here rather than at exit, where an error could not be caught
            if output.failure is not None:  # whoever wrote may have caught it
                raise output.failure
    finally:
        sys.stdout = given


def drop() -> None:
    """Discard what is still buffered, which Python would otherwise fail to flush at its exit."""
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
