"""The loop of a collector: weights, policy, environment, version, batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from fusedrl.collectors.batches import DialogBatches, TurnBatches
from fusedrl.collectors.options import Policy
from fusedrl.collectors.policy_version import stamp_turn
from fusedrl.collectors.versions import Versions
from fusedrl.compat.tensordict import copy_of, get_entry
from fusedrl.compat.torchrl import trajectory_numbers

IDS = ("collector", "traj_ids")
PROMPT = ("history", "prompt")  # what torchrl's chats give to its wrappers of language models


class TurnLoop:
    """Runs turns of all dialogs of an environment until there is a batch.

    From the policy's call to the last transform of the environment, a turn computes with one
    version of the weights, which it is tagged with.

    Args:
        env: the environment, which steps all dialogs at a time.
        batches: the queue in which turns wait for a batch.
        versions: the versions of the policy's weights.
        total: number of turns to run in all.

    Attributes:
        frames: turns so far; those of a batch are added when it is counted.
        trajectories: numbers them, and gives no number twice.
    """

    def __init__(
        self,
        env: Any,
        batches: TurnBatches | DialogBatches,
        versions: Versions,
        total: float,
    ) -> None:
        self._env, self._batches, self._versions = env, batches, versions
        self._total = total
        self.frames = 0
        self.trajectories = trajectory_numbers()
        self._ids = torch.empty(0)  # of the trajectory of each dialog, in the environment's shape
        self._carried: Any = None  # the policy's next input; None before a reset

    def batch(self, policy: Policy, check: Callable[[], None]) -> TensorDictBase:
        """Run turns until there is a batch.

        Args:
            policy: answers the dialogs.
            check: is called before each turn, and raises if there shall be none.
        """
        while (batch := self._batches.take()) is None:
            check()
            self._turn(policy)
        return batch

    def _turn(self, policy: Policy) -> None:
        if self._carried is None:
            self.restart()
            self._carried = self._begin()
        with self._versions.call() as version:
            answers = call_by_length(policy, self._carried)
            self._carried = None  # a step that is broken off ends its dialogs
            turn, carried = self._env.step_and_maybe_reset(answers)
        over = ended(turn)
        ends = over.flatten().tolist()
        if self._batches.only_last and True not in ends:
            turn = None
        else:
            turn = self._own(turn, version, self._ids)
        self.frames += self._batches.add(turn, ends, range(len(ends)))
        self._renew(over)
        self._carried = carried

    def _begin(self) -> Any:
        """Reset the environment; the policy's first input."""
        carried, shape = self._env.reset(), self._env.batch_size
        self._ids = self.trajectories.get_traj_and_increment(
            shape.numel(), device=self._env.device
        ).reshape(shape)
        return carried

    def _renew(self, over: Tensor, rows: Any = ...) -> None:
        """Begin a new trajectory where one is over, in some rows of the environment."""
        if count := int(over.sum()):
            fresh = self.trajectories.get_traj_and_increment(count, device=self._ids.device)
            self._ids[rows] = self._ids[rows].masked_scatter(over, fresh)

    def _own(self, turn: TensorDictBase, version: int | None, ids: Tensor) -> TensorDictBase:
        """A copy of a turn, as policy and environment may write into theirs, with its tags."""
        turn = copy_of(turn)
        if version is not None:
            stamp_turn(turn, version)
        return turn.set(IDS, ids.clone())

    def restart(self, finished: bool = False) -> None:
        """End running dialogs; their turns count, but are in no batch.

        Args:
            finished: whether to forget finished dialogs, too.
        """
        self._carried = None
        self.frames += self._batches.forget(finished)


def ended(turn: TensorDictBase) -> Tensor:
    """Whether the turn is the last of each dialog, in the shape of the batch."""
    done: Any = turn.get(("next", "done"))
    if done.numel() == turn.numel():
        return done.reshape(turn.batch_size)
    return done.reshape(*turn.batch_size, -1).any(-1)


def call_by_length(policy: Policy, dialogs: TensorDictBase) -> TensorDictBase:
    """Call a policy once for each length that the histories of dialogs have.

    torchrl 0.14.1's wrappers of language models raise for histories of several lengths.

    Args:
        policy: a policy that returns as many rows as it gets.
        dialogs: the dialogs. They take a single call if they have no histories, or if all histories
            have the same length.

    Returns:
        The answers, in the order of the dialogs.
    """
    if (
        # A tensordict of stacked tensors cannot hold several lengths.
        not isinstance(dialogs, LazyStackedTensorDict)
        or dialogs.stack_dim != 0
        # A quick look: most are no chats.
        or get_entry(dialogs.tensordicts[0], PROMPT[0]) is None
        or (prompts := dialogs.get(PROMPT, None)) is None
        or -1 not in prompts.batch_size
    ):
        return policy(dialogs)
    rows: list[Any] = list(dialogs.unbind(0))
    groups: dict[Any, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(row.get(PROMPT).batch_size, []).append(index)
    answers: dict[int, TensorDictBase] = {}
    for lengths, indices in groups.items():
        if -1 in lengths:  # with two batch dimensions, a row has several dialogs
            answers.update((index, call_by_length(policy, rows[index])) for index in indices)
        else:
            answer = policy(lazy_stack([rows[index] for index in indices]))
            answers.update(zip(indices, answer.unbind(0), strict=True))
    return lazy_stack([answers[index] for index in range(len(rows))])
