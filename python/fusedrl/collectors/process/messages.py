"""The messages between a trainer and its worker, and what is said in them of an exception."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from fusedrl.collectors.process.shared_batches import SharedBatch


@dataclass(frozen=True)
class More:
    """Make the batches up to number ``last``; the segments that were ``released`` are free."""

    last: int
    released: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Call a pickled function with the collector and pickled arguments, between two batches.

    ``anew`` says that the batches from before the call are outdated if it succeeds.
    """

    number: int
    pickled: bytes
    anew: bool


@dataclass(frozen=True)
class SetVersion:
    """Set the version of the collector's tracker, also while a batch is collected."""

    version: Any


@dataclass(frozen=True)
class Stop:
    """End the worker within ``timeout`` seconds."""

    timeout: float


ToWorker = More | Call | SetVersion | Stop


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, as text."""

    def __str__(self) -> str:
        """The text between quotes, so that it stands out."""
        return f'\n"""\n{self.args[0]}"""'


@dataclass(frozen=True)
class Failure:
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


@dataclass(frozen=True)
class Batch:
    """A batch, counted from 1, and the number of frames that it counts as.

    There is none of this number if the worker's collector has ended.
    """

    number: int
    shared: SharedBatch | None = None
    frames: int = 0


@dataclass(frozen=True)
class Answer:
    """The pickled result of the call of this number, or what it raised; the worker goes on.

    The batches up to number ``outdated`` are from before a call after which they are outdated.
    """

    number: int
    result: bytes | Failure
    outdated: int = 0


@dataclass(frozen=True)
class Failed:
    """The exception that ended the worker."""

    failure: Failure


ToTrainer = Batch | Answer | Failed
