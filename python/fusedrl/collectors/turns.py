"""The loop of a collector: weights, policy, environment, version, batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from tensordict import TensorDictBase

from fusedrl.collectors.batches import DialogBatches, TurnBatches
from fusedrl.collectors.call_by_length import call_by_length
from fusedrl.collectors.policy_version import stamp, stamp_tokens
from fusedrl.collectors.stopwatch import Stopwatch
from fusedrl.collectors.trajectories import Trajectories
from fusedrl.collectors.turn_copies import TurnCopies
from fusedrl.collectors.turn_rows import IDS, ended, rows_of, tag
from fusedrl.collectors.versions import Versions

Policy = Callable[[TensorDictBase], TensorDictBase]


class TurnLoop:
    """Runs turns of all dialogs of an environment until there is a batch.

    From the policy's call to the last transform of the environment, a turn computes with one
    version of the weights, which it is tagged with.

    Args:
        env: the environment, which steps all dialogs at a time.
        batches: the queue in which turns wait for a batch.
        versions: the versions of the policy's weights.
        copies: whether turns are copied.

    Attributes:
        frames: turns so far; those of a batch are added when it is counted.
        trajectories: the trajectories that the dialogs are in.
        watch: measures where the time goes.
    """

    def __init__(
        self, env: Any, batches: TurnBatches | DialogBatches, versions: Versions, copies: bool
    ) -> None:
        self._env, self._batches, self._versions, self._copies = env, batches, versions, copies
        self.frames = 0
        self.trajectories = Trajectories(by_first=False)
        self.watch = Stopwatch()
        self._carried: Any = None  # the policy's next input; None before a reset
        self._last: Any = None  # the turn before

    def batch(self, policy: Policy) -> TensorDictBase:
        """Run turns until there is a batch."""
        while (batch := self._batches.take()) is None:
            if self._carried is None:
                self._begin()
            self._turn(policy)
        return batch

    def _begin(self) -> None:
        self._carried = self._env.reset()
        self.trajectories.begin(self._env.batch_size, self._env.device)
        self.watch.lap("env")

    def _turn(self, policy: Policy) -> None:
        watch = self.watch
        with self._versions.held() as version:
            actions = call_by_length(policy, self._carried)
            watch.lap("policy")
            copies = TurnCopies() if self._copies else None
            if copies is not None:
                copies.before(actions)  # before the environment can write into the actions
            turn, self._carried = self._env.step_and_maybe_reset(actions)
            watch.lap("env")
        mask = ended(turn)
        over = mask.flatten().tolist()
        watch.turns += len(over)
        if not self._batches.skip(over):
            turn = self._checked(turn) if copies is None else copies.after(turn)
            if version is not None:
                stamp(turn, version)
                if self._versions.tracker.version != version:  # the environment wrote that one
                    stamp(turn.get("next"), version)
                if not isinstance(version, str):
                    stamp_tokens(turn)
            self._add(turn, over)
            if True in over:
                self.trajectories.renew(mask)
            if copies is None and isinstance(self._batches, TurnBatches) and self._batches.complete:
                self._carried = self._carried.clone()  # the caller may change the batch
        watch.lap("queueing")

    def _checked(self, turn: TensorDictBase) -> TensorDictBase:
        if turn is self._last:
            raise RuntimeError(
                "copy_turns: expected a tensordict of its own for each turn, got that of the turn "
                "before; leave out copy_turns=False"
            )
        self._last = turn
        return turn

    def _add(self, turn: TensorDictBase, over: list[bool]) -> None:
        if not self._batches.by_row:
            turn.set(IDS, self.trajectories.ids)
            self.watch.lap("stamping")
            self._batches.add(turn, over)
            return
        rows = rows_of(turn, own=self._copies)
        tag(rows, self.trajectories.rows)
        self.watch.lap("stamping")
        self.frames += self._batches.add(rows, over)

    def prepare(self, policy: Any) -> None:
        """Do nothing: transforms that score with the policy need no preparation."""

    def scored(self, policy: Any) -> Any:
        """The policy that transforms score with, within :meth:`scoring`."""
        return policy

    def scoring(self) -> AbstractContextManager[Any]:
        """Give that policy the version of the turn."""
        return self._versions.held(joins=True)

    def close(self) -> None:
        """Do nothing: no version is held."""

    def interrupt(self) -> None:
        """End running dialogs; their turns count, but are in no batch."""
        self._carried = None
        self.frames += self._batches.interrupt()

    def clear(self) -> None:
        """As :meth:`interrupt`, and forget finished dialogs too."""
        self.interrupt()
        self.frames += self._batches.clear()
