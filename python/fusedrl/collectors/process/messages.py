"""The messages between a trainer and its worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fusedrl.collectors.process.shared_batches import SharedBatch
from fusedrl.collectors.process.worker_errors import Failure

READY = 0  # the number of a call that is never sent; its answer says that the collector is ready


@dataclass(frozen=True)
class More:
    """Make the batches up to number ``last``; the segments that were ``released`` are free."""

    last: int
    released: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Call a pickled function with the collector and pickled arguments, between two batches."""

    number: int
    pickled: bytes


@dataclass(frozen=True)
class SetVersion:
    """Set the version of the collector's tracker, also while a batch is collected."""

    version: Any


@dataclass(frozen=True)
class Stop:
    """End the worker within ``timeout`` seconds."""

    timeout: float


ToWorker = More | Call | SetVersion | Stop


@dataclass(frozen=True)
class Batch:
    """A batch, counted from 1.

    ``frames`` is the number of frames that it counts as, and ``oldest`` its oldest version, if the
    trainer wants to know it.
    """

    number: int
    shared: SharedBatch
    frames: int
    oldest: int | None


@dataclass(frozen=True)
class End:
    """There is no batch of this number, because the worker's collector has ended."""

    number: int


@dataclass(frozen=True)
class Answer:
    """The pickled result of the call of this number; ``made`` batches were sent before it."""

    number: int
    made: int
    pickled: bytes


@dataclass(frozen=True)
class Refusal:
    """The exception that the call of this number raised; the worker goes on."""

    number: int
    failure: Failure


@dataclass(frozen=True)
class Failed:
    """The exception that ended the worker."""

    failure: Failure


ToTrainer = Batch | End | Answer | Refusal | Failed
