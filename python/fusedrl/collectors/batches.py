"""Queues in which turns wait until there are enough of them, and where batches of them go."""

from __future__ import annotations

import logging
import queue
from collections import deque
from itertools import chain
from typing import Any

from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torchrl.envs import AsyncEnvPool

from fusedrl.compat.tensordict import copy_of

logger = logging.getLogger("fusedrl")


class TurnBatches:
    """Batches of at least ``wanted`` turns of all dialogs, finished or not, with time last.

    Args:
        wanted: turns in a batch.
    """

    completed = False

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.pending = 0
        self._turns: list[Any] = []

    def skip(self, over: list[bool]) -> bool:
        """Whether a turn is only counted and is in no batch; always false here."""
        return False

    def add(self, turn: Any, over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have, 0 here."""
        self._turns.append(turn)
        self.pending += turn.numel()
        return 0

    def take(self) -> TensorDictBase | None:
        """A batch, once there are enough turns."""
        if self.pending < self.wanted:
            return None
        batch = lazy_stack(self._turns, -1)
        self._turns, self.pending = [], 0  # only now, so that Ctrl-C loses none
        return batch

    def forget(self, finished: bool = False) -> int:
        """Forget the turns that are in no batch yet, and return how many these are."""
        lost, self._turns, self.pending = self.pending, [], 0
        return lost


class RowBatches:
    """Batches of at least ``wanted`` turns in one dimension, dialog after dialog.

    Args:
        rows: how many dialogs run at a time.
        wanted: turns in a batch, at least.
        completed: whether a batch has finished dialogs only, in the order in which they ended.
        only_last: whether it has each finished dialog's last turn only.
    """

    def __init__(
        self, rows: int, wanted: int, completed: bool = False, only_last: bool = False
    ) -> None:
        self.wanted, self.completed, self._only_last = wanted, completed, only_last
        self.pending = 0  # turns of finished and of running dialogs
        self._running: list[list[Any]] = [[] for _ in range(rows)]  # None: that is only counted
        self._finished: deque[list[Any]] = deque()
        self._ready = 0  # turns of finished dialogs

    def length(self, index: int) -> int:
        """The number of turns of a running dialog."""
        return len(self._running[index])

    def skip(self, over: list[bool]) -> bool:
        """Whether a turn is only counted, because no batch will have any part of it."""
        if not self._only_last or True in over:
            return False
        for turns in self._running:
            turns.append(None)
        self.pending += len(over)
        return True

    def add(self, turn: TensorDictBase, over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have.

        Args:
            turn: the turn, a copy.
            over: for each dialog, whether the turn is its last.
        """
        rows = rows_of(turn)
        if self.completed and True in over:
            return sum(map(self.add_row, range(len(rows)), rows, over))
        for turns, row in zip(self._running, rows, strict=True):
            turns.append(row)
        self.pending += len(rows)
        return 0

    def add_row(self, index: int, row: Any, over: bool) -> int:
        """Keep one turn of one dialog; returns as :meth:`add`."""
        turns = self._running[index]
        turns.append(None if self._only_last and not over else row)
        self.pending += 1
        if not (over and self.completed):
            return 0
        self._running[index] = []
        kept = turns[-1:] if self._only_last else turns
        self._finished.append(kept)
        self._ready += len(kept)
        self.pending -= len(turns) - len(kept)
        return len(turns) - len(kept)

    def take(self) -> TensorDictBase | None:
        """A batch, once there are enough turns for it."""
        enough = self._ready if self.completed else self.pending
        if enough < self.wanted or not enough:
            return None
        turns: list[Any] = []
        if self.completed:
            while len(turns) < self.wanted:
                turns += self._finished.popleft()
            self._ready -= len(turns)
        else:
            turns = list(chain(*self._running))
            self._running = [[] for _ in self._running]
        self.pending -= len(turns)
        return lazy_stack(turns)

    def forget(self, finished: bool = False) -> int:
        """Forget running dialogs, and finished ones too if asked; returns how many turns."""
        if finished:
            self._finished.clear()
            self._ready = 0
        lost, self.pending = self.pending - self._ready, self._ready
        self._running = [[] for _ in self._running]
        return lost


def rows_of(turn: TensorDictBase) -> list[Any]:
    """The elements of a turn that was copied, each with memory of its own.

    A view, when it is kept or pickled, would take the tensors of all rows with it.
    """
    if isinstance(turn, LazyStackedTensorDict) and turn.batch_dims == 1:
        return turn.tensordicts
    return [copy_of(row) for row in turn.reshape(-1).unbind(0)]


def batches_of(
    env: Any, wanted: int, flat: bool, completed: bool, only_last: bool
) -> TurnBatches | RowBatches:
    """The queue for the turns of an environment; a pool hands out each finished dialog at once."""
    if not (flat or completed):
        return TurnBatches(wanted)
    if not isinstance(env, AsyncEnvPool):
        return RowBatches(env.batch_size.numel(), wanted, completed, only_last)
    return RowBatches(env.batch_size[0], 1 if completed else wanted, completed, only_last)


class QueueBuffer:
    """Puts each element of a batch into a bounded queue, which drops its oldest when it is full.

    It stands in the place of a replay buffer.

    Args:
        queue: a queue with ``put_nowait`` and ``get_nowait`` like those of :class:`queue.Queue`,
            such as a queue of multiprocessing or of Ray.
    """

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.dropped = 0

    def extend(self, batch: TensorDictBase) -> None:
        """Put the elements along the first dimension, in order."""
        for turn in batch.unbind(0):
            while True:
                try:
                    self.queue.put_nowait(turn)
                    break
                except queue.Full:  # Ray's error is a subclass
                    self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self.queue.get_nowait()
        except queue.Empty:  # a reader has taken it first
            return
        self.dropped += 1
        if self.dropped == 1:
            logger.warning(
                "LLMCollector: the queue is full, its oldest turns are dropped; read faster, or "
                "make it larger (this is said once, QueueBuffer.dropped counts)"
            )
