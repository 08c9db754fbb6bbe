"""The loop of a collector: weights, policy, environment, version, batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from fusedrl.collectors.batches import DialogBatches, TurnBatches
from fusedrl.collectors.options import DialogOptions, Policy
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
    """

    at_once = False  # whether each dialog that ends is a batch

    def __init__(self, env: Any, options: DialogOptions, versions: Versions) -> None:
        self._check(env, options)
        self.env, self._versions = env, versions  # transforms may be added to the environment
        rows = env.batch_size.numel()
        wanted = -(-(options.dialog_turns_per_batch or 1) // rows) * rows  # whole steps
        last = bool(options.yield_only_last_steps)
        self._batches: TurnBatches | DialogBatches = (
            DialogBatches(rows, 1 if self.at_once else wanted, last)
            if options.completed
            else TurnBatches(rows, wanted, options.flat)
        )
        self.trajectories = trajectory_numbers()
        self._ids = torch.empty(0)  # of the trajectory of each dialog
        self._ran = 0  # turns
        self._carried: Any = None  # the policy's next input; None before a reset

    def _check(self, env: Any, options: DialogOptions) -> None:
        """Raise if the environment cannot do what is asked of it."""
        if options.async_envs:
            raise RuntimeError(
                f"async_envs: expected an AsyncEnvPool as env, got {type(env).__name__}; drop it"
            )
        if options.completed and len(env.batch_size) != 1:
            raise ValueError(
                "yield_completed_trajectories: expected an env with batch_size=(n,) for n dialogs, "
                f"got batch_size={tuple(env.batch_size)}; make such a one"
            )

    @property
    def frames(self) -> int:
        """Turns that ran, but for those that a later batch has: taking a batch counts it."""
        return self._ran - self._batches.pending

    @frames.setter
    def frames(self, frames: int) -> None:
        self._ran = frames + self._batches.pending

    def batch(self, policy: Policy, check: Callable[[], None]) -> TensorDictBase:
        """Run turns until there is a batch; ``check`` raises before a turn that shall not be."""
        while (batch := self._batches.take()) is None:
            check()
            self._turn(policy)
        return batch

    def _turn(self, policy: Policy) -> None:
        if self._carried is None:
            self.restart()
            self._begin(self.env.reset())
        with self._versions.call() as version:
            carried: Any = self._carried
            answers = call_by_length(policy, carried)
            self._carried = None  # a step that is broken off ends its dialogs
            turn, carried = self.env.step_and_maybe_reset(answers)
        ends = ended(turn)
        if self._batches.only_last and True not in ends:
            turn = None
        else:
            turn = self._own(turn, version, self._ids)
        self._keep(turn, ends, range(len(ends)))
        self._carried = carried

    def _begin(self, carried: Any) -> None:
        """Begin dialogs with what a reset has returned, the policy's first input."""
        count, device = self.env.batch_size.numel(), self.env.device
        self._ids = self.trajectories.get_traj_and_increment(count, device=device)
        self._carried = carried

    def _own(self, turn: TensorDictBase, version: int | None, ids: Tensor) -> TensorDictBase:
        """A copy of a turn, as policy and environment may write into theirs, with its tags."""
        turn = copy_of(turn)
        if version is not None:
            stamp_turn(turn, version)
        return turn.set(IDS, ids.reshape(turn.batch_size).clone())

    def _keep(self, turn: Any, ends: list[bool], indices: Iterable[int]) -> None:
        """Keep the turn of some dialogs for a batch; those that it ends are followed by others."""
        self._ran += len(ends)
        self._batches.add(turn, ends, indices)
        if over := [index for index, is_last in zip(indices, ends, strict=True) if is_last]:
            device = self._ids.device
            self._ids[over] = self.trajectories.get_traj_and_increment(len(over), device=device)

    def restart(self, finished: bool = False) -> None:
        """End running dialogs, and forget ``finished`` ones if asked; their turns are counted."""
        self._carried = None
        self._batches.forget(finished)


def ended(turn: TensorDictBase) -> list[bool]:
    """Whether the turn is the last of each dialog."""
    done: Any = turn.get(("next", "done"))
    return done.reshape(turn.numel(), -1).any(-1).tolist()


def call_by_length(policy: Policy, dialogs: TensorDictBase) -> TensorDictBase:
    """Call a policy once for each length that the histories of dialogs have.

    torchrl 0.14.1's wrappers of language models raise for histories of several lengths. A policy
    returns as many rows as it gets.
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
