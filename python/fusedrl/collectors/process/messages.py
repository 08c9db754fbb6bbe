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


class WorkerTraceback(Exception):
    """The cause of an exception that a worker raised: the worker's traceback, between quotes."""


@dataclass(frozen=True)
class Failure:
    """An exception as a pickle; by itself, it is what ended the worker."""

    pickled: bytes

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Make any exception portable: one that is not becomes a ``RuntimeError``."""
        text = "".join(traceback.format_exception(error))
        failure = cls(b"")
        with contextlib.suppress(Exception):  # its __init__ or __reduce__ may prevent that
            failure = cls(cloudpickle.dumps((error, text)))  # its class may be a local one
            if isinstance(failure.exception(), Exception):
                return failure
        last = text.rstrip().rsplit("\n", 1)[-1]
        message = f"worker: expected it to collect, got {last}; its traceback is above"
        return cls(pickle.dumps((RuntimeError(message), text)))

    def exception(self) -> Exception:
        """The exception, with the worker's traceback as its cause."""
        error, text = pickle.loads(self.pickled)
        error.__cause__ = WorkerTraceback(f'\n"""\n{text}"""')
        return error


ToWorker = More | Call | SetVersion | Stop
ToTrainer = Batch | Answer | Failure
