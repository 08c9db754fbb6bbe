"""Carries exceptions from a worker process to the trainer."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import NamedTuple

import cloudpickle


class ShutDown(RuntimeError):
    """The error of using a collector that was shut down."""

    def __init__(self) -> None:
        super().__init__(
            "collector: expected one that runs, got one that was shut down; make another one"
        )


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, as text."""

    def __str__(self) -> str:
        """The text between quotes, so that it stands out."""
        return f'\n"""\n{self.args[0]}"""'


class Failure(NamedTuple):
    """An exception as its pickle, if it can be pickled and read, and its traceback as text."""

    data: bytes | None
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make any exception portable."""
        data = None
        with contextlib.suppress(Exception):
            data = cloudpickle.dumps(error)  # its class may be a local one, or pickled by value
        return cls(data if _read(data) is not None else None, _text(error))

    def exception(self) -> Exception:
        """The exception, with the worker's traceback as its cause."""
        error = _read(self.data)
        if error is None:
            last = self.text.rstrip().rsplit("\n", 1)[-1]
            error = RuntimeError(
                f"worker: expected it to collect, got {last}; its traceback is above"
            )
        error.__cause__ = WorkerTraceback(self.text)
        return error


def _read(data: bytes | None) -> Exception | None:
    """The exception in a pickle; ``None`` if its ``__init__`` or ``__reduce__`` prevents that."""
    with contextlib.suppress(Exception):
        error = None if data is None else pickle.loads(data)
        return error if isinstance(error, Exception) else None
    return None


def _text(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # its __str__ may raise anything
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{type(error).__qualname__}\n"
