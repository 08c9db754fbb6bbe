"""What turns wait in until there are enough of them for a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tensordict import TensorDictBase, lazy_stack


class Turns:
    """Batches of at least ``wanted`` turns of all dialogs, finished or not.

    Args:
        wanted: turns in a batch.
        flatten: whether a batch has one dimension, dialog after dialog, or time as its last.
    """

    def __init__(self, wanted: int, flatten: bool) -> None:
        self.wanted = wanted
        self.flatten = flatten
        self.turns: list[TensorDictBase] = []
        self.pending = 0

    def interrupt(self) -> int:
        """Forget what is of no batch yet; returns how many turns those are."""
        lost, self.turns, self.pending = self.pending, [], 0
        return lost

    def clear(self) -> int:
        """As :meth:`interrupt`."""
        return self.interrupt()

    def add(self, turn: TensorDictBase, over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have: none."""
        _refuse_twice(turn, self.turns)
        self.turns.append(turn)
        self.pending += turn.numel()
        return 0

    def take(self) -> TensorDictBase | None:
        """A batch, once there are enough turns."""
        if self.pending < self.wanted:
            return None
        turns, self.turns, self.pending = self.turns, [], 0
        return lazy_stack(_flat(turns)) if self.flatten else lazy_stack(turns, -1)


class Dialogs:
    """Batches of finished dialogs: those that make up ``wanted`` turns, in the order they ended.

    Args:
        rows: how many dialogs run at a time.
        wanted: turns in a batch, at least.
        only_last: whether a batch has each dialog's last turn only.
    """

    def __init__(self, rows: int, wanted: int, only_last: bool) -> None:
        self.wanted = wanted
        self.only_last = only_last
        self.running: list[list[TensorDictBase]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows  # turns of each running dialog
        self.finished: deque[list[TensorDictBase]] = deque()
        self.ready = 0  # turns of finished dialogs
        self.pending = 0  # these and the turns of running ones

    def interrupt(self) -> int:
        """Forget the running dialogs; returns how many turns they had."""
        lost, self.pending = self.pending - self.ready, self.ready
        self.lengths = [0] * len(self.running)
        self.running = [[] for _ in self.running]
        return lost

    def clear(self) -> int:
        """Forget the finished ones, too."""
        lost = self.interrupt() + self.ready
        self.finished.clear()
        self.ready = self.pending = 0
        return lost

    def add(self, turn: TensorDictBase, over: list[bool]) -> int:
        """Keep one turn of every dialog; returns how many turns no batch will have.

        Args:
            turn: of shape (rows,).
            over: for each row whether this turn is the last of its dialog.
        """
        if self.only_last and not any(over):
            self.lengths = [n + 1 for n in self.lengths]
            self.pending += turn.numel()
            return 0
        rows = enumerate(zip(turn.unbind(0), over, strict=True))
        return sum(self.add_row(index, row, done) for index, (row, done) in rows)

    def add_row(self, index: int, row: TensorDictBase, over: bool) -> int:
        """Keep one turn of one dialog, as :meth:`add`."""
        turns = self.running[index]
        _refuse_twice(row, turns)
        if not self.only_last or over:
            turns.append(row)
        self.lengths[index] += 1
        size = row.numel()
        self.pending += size
        if not over:
            return 0
        dropped = (self.lengths[index] - len(turns)) * size
        self.finished.append(_flat(turns))
        self.ready += len(self.finished[-1])
        self.pending -= dropped
        self.running[index], self.lengths[index] = [], 0
        return dropped

    def take(self) -> TensorDictBase | None:
        """A batch, once enough turns are of finished dialogs."""
        if not self.finished or self.ready < self.wanted:
            return None
        turns: list[TensorDictBase] = []
        while not turns or len(turns) < self.wanted:
            turns += self.finished.popleft()
        self.ready -= len(turns)
        self.pending -= len(turns)
        return lazy_stack(turns)


def _refuse_twice(turn: TensorDictBase, turns: Sequence[TensorDictBase]) -> None:
    # Turns are kept without a copy: it would take longer than all the rest.
    if turns and turn is turns[-1]:
        raise RuntimeError(
            "policy: expected a tensordict of its own for each turn, got that of the turn before; "
            "write into the one that the policy is given, or return a new one"
        )


def _flat(turns: Sequence[TensorDictBase]) -> list[TensorDictBase]:
    """Turns of several dialogs without their batch dimensions: one dialog after the other."""
    if not turns[0].batch_dims:
        return list(turns)
    by_turn = [turn if turn.batch_dims == 1 else turn.reshape(-1) for turn in turns]
    by_dialog = zip(*(turn.unbind(0) for turn in by_turn), strict=True)
    return [turn for dialog in by_dialog for turn in dialog]
