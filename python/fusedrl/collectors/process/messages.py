"""What a trainer and its worker say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fusedrl.collectors.process.shared_batches import SharedBatch
from fusedrl.collectors.process.worker_errors import Failure

READY = 0  # the number of a call that nobody sends: its answer is that there is a collector


@dataclass(frozen=True)
class More:
    """Make the batches up to number ``last``; the segments that were ``released`` are free."""

    last: int
    released: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Call what is pickled here, a function and its further arguments, between two batches."""

    number: int
    pickled: bytes


@dataclass(frozen=True)
class SetVersion:
    """Let the collector's tracker have a version, also while it collects."""

    version: Any


@dataclass(frozen=True)
class Stop:
    """End within so many seconds."""

    timeout: float


ToWorker = More | Call | SetVersion | Stop


@dataclass(frozen=True)
class Batch:
    """A batch, counted from 1.

    ``frames`` are how many it counts as, ``oldest`` is its oldest version, if that was asked for.
    """

    number: int
    shared: SharedBatch
    frames: int
    oldest: int | None


@dataclass(frozen=True)
class End:
    """There is no batch of this number: the worker's collector has come to its end."""

    number: int


@dataclass(frozen=True)
class Answer:
    """What the call of this number returned, pickled; ``made`` batches were sent before."""

    number: int
    made: int
    pickled: bytes


@dataclass(frozen=True)
class Refusal:
    """What the call of this number raised; the worker goes on."""

    number: int
    failure: Failure


@dataclass(frozen=True)
class Failed:
    """What ended the worker."""

    failure: Failure


ToTrainer = Batch | End | Answer | Refusal | Failed
