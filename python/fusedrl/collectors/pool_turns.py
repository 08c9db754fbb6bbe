"""The loop of a collector whose environment is a pool, where each dialog runs at its own pace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from typing import Any

from tensordict import TensorDictBase, lazy_stack
from torch import nn

from fusedrl.channel.rendezvous import interrupted_later
from fusedrl.collectors.batches import RowBatches
from fusedrl.collectors.policy_version import stamp_turn
from fusedrl.collectors.turns import IDS, Policy, TurnLoop, call_by_length, ended
from fusedrl.compat.tensordict import copy_of
from fusedrl.compat.torchrl import (
    env_indices,
    forget_steps,
    steps_have_ended,
    will_take_policy,
)


class PoolLoop(TurnLoop):
    """Runs the dialogs of an ``AsyncEnvPool``, and takes each turn as soon as it is done.

    If an environment raises, all running dialogs end, and the next turn begins new ones.

    Args:
        env: the pool, which steps each dialog by itself.
        parts: the other arguments of :class:`TurnLoop`.
    """

    def __init__(self, env: Any, *parts: Any) -> None:
        super().__init__(env, *parts)
        self._prepared: tuple[Any, Any] = (None, None)  # the follower and the policy
        self._running = False
        self._failed: Exception | None = None  # the error that ended a pool of processes
        # The version of each turn that an environment steps; nothing is carried meanwhile.
        self._asked: dict[int, Any] = {}
        # Dialogs that wait because the rest of the budget may be used up by others.
        self._waiting: dict[int, TensorDictBase] = {}

    def prepare(self, policy: Any) -> None:
        """Let a version last until the environments have stepped that compute with the policy.

        While an environment steps, the policy is called for others. Without a channel, updates wait
        for the environments.

        Raises:
            ValueError: the weights come through a channel, where the others may have newer ones.
        """
        follower = self._versions.follower
        if all(map(is_, self._prepared, (follower, policy))):
            return
        scoring = self._scoring(policy if follower is None else follower.module)
        if scoring and follower is not None:
            raise ValueError(
                f"env: expected environments of a pool that leave the policy alone, whose weights "
                f"change while they step, got a {type(scoring[0]).__name__} that computes with it; "
                "score with a model of its own, or outside of a pool"
            )
        if scoring:
            self._versions.settle = partial(steps_have_ended, self._env)
        self._prepared = follower, policy

    def _scoring(self, policy: Any) -> list[Any]:
        """The parts of environments that compute with the policy; processes cannot reach it."""
        own = {
            id(parameter)
            for module in (policy, getattr(policy, "model", None))
            if isinstance(module, nn.Module)
            for parameter in module.parameters()
        }
        return [
            part
            for env in getattr(self._env, "envs", ())
            for part in env.modules()
            if getattr(part, "takes_policy", False)
            or will_take_policy(part)
            or any(id(parameter) in own for parameter in part.parameters(recurse=False))
        ]

    def scoring(self) -> AbstractContextManager[Any]:
        """Nothing: updates wait for the environments."""
        return nullcontext()

    def _advance(self, policy: Policy) -> None:
        """Take turns that are done, and ask for the next of their dialogs.

        Raises:
            RuntimeError: an environment of a pool of processes has failed before.
        """
        if not self._running:
            with self._environments():
                self._carried = self._env.reset()
            self.trajectories.begin(self._env.batch_size, self._env.device)
            self._running = True
        if self._carried is not None:
            self._ask(policy)
        self._take(policy)

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
            if not forget_steps(self._env):
                self._failed = error
            self._forget()
            raise

    def _ask(self, policy: Policy) -> None:
        """Call the policy, and let the environments take their step."""
        carried = self._carried
        indices = env_indices(self._env, carried)
        with self._versions.held() as version:
            # The policy is called again, and may write there, while the environments step.
            answers = copy_of(call_by_length(policy, carried))
            with self._environments():
                self._env.async_step_and_maybe_reset_send(answers)
        self._asked.update(dict.fromkeys(indices, version))
        self._carried = None  # only now, so that a policy that raises is called again

    def _take(self, policy: Policy) -> None:
        """Wait for the first environments that have stepped, and keep their turns."""
        batches = self._batches
        least = self._env.min_get if batches.completed else self._env.num_envs
        least = min(least, len(self._asked))  # fewer dialogs run once the budget is used up
        with self._environments():
            turn, carried = self._env.async_step_and_maybe_reset_recv(least)
        indices, mask = env_indices(self._env, turn), ended(turn)
        with interrupted_later():  # a turn that has run is kept
            self._carried = carried
            rows = [self._own(row, i) for i, row in zip(indices, turn.unbind(0), strict=True)]
            if isinstance(batches, RowBatches):
                for index, row, over in zip(indices, rows, mask, strict=True):
                    self.frames += batches.add_row(index, row.reshape(-1)[0], bool(over.any()))
            else:
                batches.add(lazy_stack(rows), [])
            self.trajectories.renew(mask, indices)
        if batches.completed and self.frames + batches.pending < self._total:
            self._ask(policy)
        elif batches.completed:
            self._hold(indices)

    def _own(self, row: TensorDictBase, index: int) -> TensorDictBase:
        """A copy of one environment's turn, tagged with its version and its trajectory."""
        row, version = copy_of(row), self._asked.pop(index)
        if version is not None:
            stamp_turn(row, version)
        return row.set(IDS, self.trajectories.ids[index].clone())

    def _hold(self, indices: list[int]) -> None:
        """Near the end of the budget, run only the dialogs that can use it, the longest first."""
        self._waiting.update(zip(indices, self._carried.unbind(0), strict=True))
        self._carried = None
        if not self._asked and isinstance(self._batches, RowBatches):
            longest = max(self._waiting, key=self._batches.length)
            self._carried = lazy_stack([self._waiting.pop(longest)])

    def restart(self, finished: bool = False) -> None:
        """As for :class:`TurnLoop`; waits for environments that step."""
        if self._asked:
            with self._environments():
                self._env.async_step_and_maybe_reset_recv(len(self._asked))
        self._forget(finished)

    def _forget(self, finished: bool = False) -> None:
        self.frames += len(self._asked)
        self._asked, self._waiting, self._running = {}, {}, False
        super().restart(finished)
