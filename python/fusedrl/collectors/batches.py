"""Accumulate turns into batches, and put batches into a queue."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack

from fusedrl.channel.ranks import interrupted_later
from fusedrl.compat.tensordict import copy_of
from fusedrl.logs import warn_once


class TurnBatches:
    """Batches of at least ``wanted`` turns of all dialogs, finished or not.

    With ``flat`` batches have one dimension, dialog by dialog; otherwise the last one is time.
    """

    only_last = False

    def __init__(self, rows: int, wanted: int, flat: bool) -> None:
        self._rows, self._wanted, self._flat = rows, wanted, flat
        self._turns: list[Any] = []

    @property
    def pending(self) -> int:
        """Number of turns not yet in a batch."""
        return len(self._turns) * self._rows

    def add(self, turn: Any, ends: list[bool], indices: Iterable[int]) -> None:
        """Store one turn of every dialog."""
        self._turns.append(turn)

    def take(self) -> TensorDictBase | None:
        """A batch, or ``None`` until there are enough turns."""
        if self.pending < self._wanted:
            return None
        if self._flat:
            batch = lazy_stack([*chain(*zip(*map(rows_of, self._turns), strict=True))])
        else:
            batch = lazy_stack(self._turns, -1)
        self._turns = []
        return batch

    def forget(self, finished: bool) -> None:
        """Discard the turns that are not yet in a batch."""
        self._turns = []


class DialogBatches:
    """Batches of at least ``wanted`` turns of finished dialogs, in the order in which they ended.

    With ``only_last`` they contain only the last turn of each dialog.
    """

    def __init__(self, rows: int, wanted: int, only_last: bool) -> None:
        self._wanted, self.only_last = wanted, only_last
        self._running: list[list[Any]] = [[] for _ in range(rows)]  # None: a turn that is not kept
        self._finished: deque[list[Any]] = deque()

    @property
    def pending(self) -> int:
        """Number of turns, of finished and running dialogs, not yet in a batch."""
        return sum(map(len, chain(self._finished, self._running)))

    def length(self, index: int) -> int:
        """Number of turns of a running dialog."""
        return len(self._running[index])

    def add(self, turn: Any, ends: list[bool], indices: Iterable[int]) -> None:
        """Store a turn of the dialogs ``indices``; if ``turn`` is ``None``, only count it."""
        rows = [None] * len(ends) if turn is None else rows_of(turn)
        for index, row, is_last in zip(indices, rows, ends, strict=True):
            turns = self._running[index]
            turns.append(row if is_last or not self.only_last else None)
            if is_last:
                self._running[index] = []
                self._finished.append(turns[-1:] if self.only_last else turns)

    def take(self) -> TensorDictBase | None:
        """A batch, or ``None`` until there are enough turns."""
        if sum(map(len, self._finished)) < self._wanted:
            return None
        turns: list[Any] = []
        while len(turns) < self._wanted:
            turns += self._finished.popleft()
        return lazy_stack(turns)

    def forget(self, finished: bool) -> None:
        """Discard running dialogs, and with ``finished`` the finished ones too."""
        if finished:
            self._finished.clear()
        self._running = [[] for _ in self._running]


def rows_of(turn: TensorDictBase) -> list[Any]:
    """The rows of a copied turn, each with separate storage.

    Keeping or pickling a view would keep or pickle the storage of all rows.
    """
    if isinstance(turn, LazyStackedTensorDict) and len(turn.tensordicts) == turn.numel():
        return [row.reshape(-1)[0] if row.batch_dims else row for row in turn.tensordicts]
    return [copy_of(row) for row in turn.reshape(-1).unbind(0)]


class QueueBuffer:
    """Wraps a Python or Ray queue as a replay buffer; if it is full, the oldest turn is dropped."""

    def __init__(self, queue: Any) -> None:
        self.queue = queue

    def extend(self, batch: TensorDictBase) -> None:
        """Put the elements along the first dimension in order."""
        for turn in batch.unbind(0):
            while True:
                try:
                    with interrupted_later():  # Ctrl-C could leave its lock held
                        self.queue.put_nowait(turn)
                    break
                except queue.Full:  # Ray's error is a subclass
                    warn_once(
                        "LLMCollector: the queue is full and its oldest turns are dropped; read "
                        "faster or use a larger queue (logged once)"
                    )
                    with suppress(queue.Empty), interrupted_later():  # a reader was faster
                        self.queue.get_nowait()
