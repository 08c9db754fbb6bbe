"""Queues in which turns wait until there are enough of them for a batch.

A queue that is ``by_row`` takes each turn as a list with a tensordict for each row, and others take
it as one tensordict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from fusedrl.collectors.turn_rows import rows_of


class TurnBatches:
    """Batches of at least ``wanted`` turns of all dialogs, finished or not, with time last.

    Args:
        wanted: turns in a batch.
    """

    by_row = False

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.turns: list[Any] = []
        self.pending = 0

    def interrupt(self) -> int:
        """Forget the turns that are in no batch yet, and return how many these are."""
        lost, self.turns, self.pending = self.pending, [], 0
        return lost

    def clear(self) -> int:
        """As :meth:`interrupt`."""
        return self.interrupt()

    @property
    def complete(self) -> bool:
        """Whether there are enough turns for a batch."""
        return self.pending >= self.wanted

    def skip(self, over: list[bool]) -> bool:
        """Whether a turn is only counted and is in no batch; always false here."""
        return False

    def add(self, turn: Any, over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have, 0 here."""
        self.turns.append(turn)
        self.pending += turn.numel()
        return 0

    def take(self) -> TensorDictBase | None:
        """A batch, once there are enough turns."""
        if not self.complete:
            return None
        turns, self.turns, self.pending = self.turns, [], 0
        return lazy_stack(turns, -1)


class FlatBatches(TurnBatches):
    """Batches as of :class:`TurnBatches`, in one dimension, dialog after dialog."""

    by_row = True

    def add(self, rows: list[TensorDictBase], over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have, 0 here."""
        self.turns.append(rows)
        self.pending += len(rows)
        return 0

    def take(self) -> TensorDictBase | None:
        """A batch, once there are enough turns."""
        if not self.complete:
            return None
        turns, self.turns, self.pending = self.turns, [], 0
        return lazy_stack(_by_dialog(turns))


class DialogBatches:
    """Batches of finished dialogs with at least ``wanted`` turns, in the order in which they ended.

    Args:
        rows: how many dialogs run at a time.
        wanted: turns in a batch, at least.
        only_last: whether a batch has each dialog's last turn only.
    """

    by_row = True

    def __init__(self, rows: int, wanted: int, only_last: bool) -> None:
        self.wanted = wanted
        self.only_last = only_last
        self.running: list[list[TensorDictBase]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows  # turns of each running dialog
        self.finished: deque[list[TensorDictBase]] = deque()
        self.ready = 0  # turns of finished dialogs
        self.pending = 0  # turns of finished and of running dialogs

    def interrupt(self) -> int:
        """Forget the running dialogs; returns how many turns they had."""
        lost, self.pending = self.pending - self.ready, self.ready
        self.lengths = [0] * len(self.running)
        self.running = [[] for _ in self.running]
        return lost

    def clear(self) -> int:
        """Forget the running and the finished dialogs; returns how many turns they had."""
        lost = self.interrupt() + self.ready
        self.finished.clear()
        self.ready = self.pending = 0
        return lost

    def skip(self, over: list[bool]) -> bool:
        """Whether a turn is only counted, because no batch will have any part of it."""
        if not self.only_last or True in over:
            return False
        self.lengths = [n + 1 for n in self.lengths]
        self.pending += len(over)
        return True

    def add(self, rows: list[TensorDictBase], over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have.

        Args:
            rows: the turns.
            over: for each turn, whether it is the last of its dialog.
        """
        numbered = enumerate(zip(rows, over, strict=True))
        return sum(self.add_row(index, row, done) for index, (row, done) in numbered)

    def add_row(self, index: int, row: TensorDictBase, over: bool) -> int:
        """Keep one turn of one dialog, a row with one element; returns as :meth:`add`."""
        turns = self.running[index]
        if not self.only_last or over:
            turns.append(row)
        self.lengths[index] += 1
        self.pending += 1
        if not over:
            return 0
        dropped = self.lengths[index] - len(turns)
        self.finished.append(_by_dialog(map(rows_of, turns)) if row.batch_dims else turns)
        self.ready += len(self.finished[-1])
        self.pending -= dropped
        self.running[index], self.lengths[index] = [], 0
        return dropped

    def take(self) -> TensorDictBase | None:
        """A batch, once finished dialogs have enough turns."""
        if not self.finished or self.ready < self.wanted:
            return None
        turns: list[TensorDictBase] = []
        while not turns or len(turns) < self.wanted:
            turns += self.finished.popleft()
        self.ready -= len(turns)
        self.pending -= len(turns)
        return lazy_stack(turns)


def _by_dialog(turns: Iterable[list[TensorDictBase]]) -> list[TensorDictBase]:
    """One dialog after the other."""
    return [turn for dialog in zip(*turns, strict=True) for turn in dialog]
