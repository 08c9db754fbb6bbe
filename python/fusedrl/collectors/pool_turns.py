"""The loop of a collector whose environment is a pool, where each dialog runs at its own pace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from fusedrl.collectors.batches import DialogBatches, TurnBatches
from fusedrl.collectors.call_by_length import call_by_length
from fusedrl.collectors.policy_version import stamp, stamp_tokens
from fusedrl.collectors.pool_scoring import PoolScoring
from fusedrl.collectors.pools import env_indices, forget_all
from fusedrl.collectors.stopwatch import Stopwatch
from fusedrl.collectors.trajectories import Trajectories
from fusedrl.collectors.turn_copies import TurnCopies
from fusedrl.collectors.turn_rows import ended, rows_of, tag
from fusedrl.collectors.turns import Policy
from fusedrl.collectors.versions import Versions


@dataclass
class Asked:
    """A turn that an environment of the pool is stepping.

    Attributes:
        version: the policy's version when it was called for the turn.
        copies: copies of what the environment was given, if turns are copied.
    """

    version: Any
    copies: TurnCopies | None


class PoolLoop:
    """Runs the dialogs of an ``AsyncEnvPool``, and takes each turn as soon as it is done.

    If an environment raises, all running dialogs end, and the next turn begins new ones.

    Args:
        pool: the pool, which steps each dialog by itself.
        batches: the queue in which turns wait for a batch.
        versions: the versions of the policy's weights.
        copies: whether turns are copied.
        total: number of turns to run in all.

    Attributes:
        frames, trajectories, watch: as for :class:`TurnLoop`.
    """

    def __init__(
        self,
        pool: Any,
        batches: TurnBatches | DialogBatches,
        versions: Versions,
        copies: bool,
        total: float,
    ) -> None:
        self._pool, self._batches, self._versions, self._copies = pool, batches, versions, copies
        self._total = total
        self.frames = 0
        self.trajectories = Trajectories(by_first=True)
        self.watch = Stopwatch()
        self._scoring = PoolScoring(pool, versions)
        self._running = False
        self._failed: Exception | None = None  # the error that ended a pool of processes
        self._carried: Any = None  # the policy's next input; None while environments step
        self._asked: dict[int, Asked] = {}  # by environment
        # Dialogs that wait because the rest of the budget may be used up by others.
        self._waiting: dict[int, TensorDictBase] = {}

    def batch(self, policy: Policy) -> TensorDictBase:
        """Run turns until there is a batch.

        Raises:
            RuntimeError: an environment of a pool of processes has failed before.
        """
        while (batch := self._batches.take()) is None:
            if not self._running:
                with self._environments():
                    self._carried = self._pool.reset()
                self.trajectories.begin(self._pool.batch_size, self._pool.device)
                self._running = True
                self.watch.lap("env")
            if self._carried is not None:
                self._ask(policy)
            self._take(policy)
        return batch

    @contextmanager
    def _environments(self) -> Iterator[None]:
        """Use the pool in this block; after an error, new dialogs begin."""
        if self._failed is not None:
            raise RuntimeError(
                "env: expected a pool whose environments run, got one of processes where one has "
                "failed (see the cause); make another pool and another collector"
            ) from self._failed
        try:
            yield
        except Exception as error:
            if not forget_all(self._pool):
                self._failed = error
            self.frames += len(self._asked)
            self._forget()
            raise

    def _ask(self, policy: Policy) -> None:
        """Call the policy, and let the environments take their step."""
        carried = self._carried
        indices = env_indices(carried, self._pool)
        with self._versions.held() as version:
            actions = call_by_length(policy, carried)
            self.watch.lap("policy")
            copies = TurnCopies() if self._copies else None
            if copies is not None:
                # The policy is called again, and may write there, while the environments step.
                actions = TurnCopies().after(actions)
                copies.before(actions)  # before an environment can write into the actions
            with self._scoring.turns_of(indices), self._environments():
                self._pool.async_step_and_maybe_reset_send(actions)
        self._asked.update(dict.fromkeys(indices, Asked(version, copies)))
        self._carried = None  # only now, so that a policy that raises is called again
        self.watch.lap("env")

    def _take(self, policy: Policy) -> None:
        """Wait for the first environments that have stepped, and keep their turns."""
        watch, batches = self.watch, self._batches
        least = self._pool.min_get if isinstance(batches, DialogBatches) else self._pool.num_envs
        least = min(least, len(self._asked))  # fewer dialogs run once the budget is used up
        with self._environments():
            turn, self._carried = self._pool.async_step_and_maybe_reset_recv(least)
        watch.lap("env")
        indices, mask = env_indices(turn, self._pool), ended(turn)
        rows = [self._own(row, index) for index, row in zip(indices, turn.unbind(0), strict=True)]
        ids = self.trajectories.rows
        tag(rows, [ids[index] for index in indices])
        watch.turns += turn.numel()
        watch.lap("stamping")
        if isinstance(batches, DialogBatches):
            for index, row, over in zip(indices, rows, mask, strict=True):
                self.frames += batches.add_row(index, row, bool(over.any()))
            self.trajectories.renew(mask, indices)
            watch.lap("queueing")
            if self.frames + batches.pending < self._total:
                self._ask(policy)
            else:
                self._hold(batches, indices)
            return
        whole = lazy_stack(rows)
        batches.add(rows_of(whole) if batches.by_row else whole, [])
        self.trajectories.renew(mask, indices)
        if batches.complete and not self._copies:
            self._carried = self._carried.clone()  # the caller may change the batch
        watch.lap("queueing")

    def _own(self, row: TensorDictBase, index: int) -> TensorDictBase:
        """One environment's turn, tagged with its version."""
        asked = self._asked.pop(index)
        if asked.copies is not None:
            row = asked.copies.after(row)
        if asked.version is not None:
            stamp(row, asked.version)
            stamp(row.get("next"), asked.version)
            if not isinstance(asked.version, str):
                stamp_tokens(row)
        return row

    def _hold(self, batches: DialogBatches, indices: list[int]) -> None:
        """Near the end of the budget, run only the dialogs that can use it, the longest first."""
        self._waiting.update(zip(indices, self._carried.unbind(0), strict=True))
        self._carried = None
        if not self._asked:
            longest = max(self._waiting, key=batches.lengths.__getitem__)
            self._carried = lazy_stack([self._waiting.pop(longest)])

    def prepare(self, policy: Any) -> None:
        """Prepare for transforms that score with the policy, as :class:`PoolScoring` says."""
        self._scoring.prepare(policy)

    def scored(self, policy: Any) -> Any:
        """The policy that transforms score with, within :meth:`scoring`."""
        return self._scoring.policy or policy

    def scoring(self) -> AbstractContextManager[Any]:
        """Give that policy the version of the turn that this thread steps."""
        return self._scoring.held()

    def close(self) -> None:
        """Release all versions."""
        self._scoring.close()

    def interrupt(self) -> None:
        """End running dialogs; their turns count, but are in no batch."""
        if self._asked:
            with self._environments():
                self._pool.async_step_and_maybe_reset_recv(len(self._asked))
            self.frames += len(self._asked)
        self._forget()

    def _forget(self) -> None:
        self._asked, self._waiting, self._carried, self._running = {}, {}, None, False
        self.frames += self._batches.interrupt()

    def clear(self) -> None:
        """As :meth:`interrupt`, and forget finished dialogs too."""
        self.interrupt()
        self.frames += self._batches.clear()
