"""The collection loop: acquire weights, call the policy, step the environment, tag, batch."""

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
PROMPT = ("history", "prompt")  # input of torchrl's LLM wrappers in chat environments


class TurnLoop:
    """Runs turns of all dialogs of an environment until there is a batch.

    A turn uses one version of the weights from the call of the policy to the last transform of the
    environment, and is tagged with it.
    """

    batch_per_dialog = False  # whether each finished dialog is a batch

    def __init__(self, env: Any, options: DialogOptions, versions: Versions) -> None:
        self._check(env, options)
        self.env, self._versions = env, versions  # replaced when a tracker is appended
        rows = env.batch_size.numel()
        wanted = -(-(options.dialog_turns_per_batch or 1) // rows) * rows  # full steps
        last = bool(options.yield_only_last_steps)
        self._batches: TurnBatches | DialogBatches = (
            DialogBatches(rows, 1 if self.batch_per_dialog else wanted, last)
            if options.completed
            else TurnBatches(rows, wanted, options.flat)
        )
        self.trajectories = trajectory_numbers()
        self._ids = torch.empty(0)  # trajectory ID of each dialog
        self._turns_run = 0
        self._carried: Any = None  # the policy's next input; None before a reset

    def _check(self, env: Any, options: DialogOptions) -> None:
        """Raise if the environment does not support the options."""
        if options.async_envs:
            raise RuntimeError(
                f"async_envs: expected AsyncEnvPool as env, got {type(env).__name__}; leave it out"
            )
        if options.completed and len(env.batch_size) != 1:
            raise ValueError(
                "yield_completed_trajectories: expected an env with batch_size=(n,) for n dialogs, "
                f"got batch_size={tuple(env.batch_size)}; give env one batch dimension"
            )

    @property
    def frames(self) -> int:
        """Turns run and already returned in a batch."""
        return self._turns_run - self._batches.pending

    @frames.setter
    def frames(self, frames: int) -> None:
        self._turns_run = frames + self._batches.pending

    def batch(self, policy: Policy, check: Callable[[], None]) -> TensorDictBase:
        """Run turns until there is a batch; ``check`` may raise before each turn."""
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
            self._carried = None  # an interrupted step ends its dialogs
            turn, carried = self.env.step_and_maybe_reset(answers)
        ends = ended(turn)
        if self._batches.only_last and True not in ends:
            turn = None
        else:
            turn = self._tagged(turn, version, self._ids)
        self._store(turn, ends, range(len(ends)))
        self._carried = carried

    def _begin(self, carried: Any) -> None:
        """Begin dialogs with the output of a reset, the first input of the policy."""
        count, device = self.env.batch_size.numel(), self.env.device
        self._ids = self.trajectories.get_traj_and_increment(count, device=device)
        self._carried = carried

    def _tagged(self, turn: TensorDictBase, version: int | None, ids: Tensor) -> TensorDictBase:
        """A copy of a turn with its tags; policy and environment may reuse the original."""
        turn = copy_of(turn)
        if version is not None:
            stamp_turn(turn, version)
        return turn.set(IDS, ids.reshape(turn.batch_size).clone())

    def _store(self, turn: Any, ends: list[bool], indices: Iterable[int]) -> None:
        """Store the turn of the dialogs ``indices``; finished dialogs get new trajectory IDs."""
        self._turns_run += len(ends)
        self._batches.add(turn, ends, indices)
        if over := [index for index, is_last in zip(indices, ends, strict=True) if is_last]:
            device = self._ids.device
            self._ids[over] = self.trajectories.get_traj_and_increment(len(over), device=device)

    def restart(self, finished: bool = False) -> None:
        """End running dialogs, and with ``finished`` drop finished ones; all count as run."""
        self._carried = None
        self._batches.forget(finished)


def ended(turn: TensorDictBase) -> list[bool]:
    """Whether the turn is the last of each dialog."""
    done: Any = turn.get(("next", "done"))
    return done.reshape(turn.numel(), -1).any(-1).tolist()


def call_by_length(policy: Policy, dialogs: TensorDictBase) -> TensorDictBase:
    """Call a policy once for each length of the chat histories.

    torchrl 0.14.1's LLM wrappers raise for histories of different lengths. The policy must return
    one row for each input row.
    """
    if (
        # A tensordict of stacked tensors cannot hold several lengths.
        not isinstance(dialogs, LazyStackedTensorDict)
        or dialogs.stack_dim != 0
        # Cheap test: most dialogs are not chats.
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
        if -1 in lengths:  # two batch dimensions: a row has several dialogs
            answers.update((index, call_by_length(policy, rows[index])) for index in indices)
        else:
            answer = policy(lazy_stack([rows[index] for index in indices]))
            answers.update(zip(indices, answer.unbind(0), strict=True))
    return lazy_stack([answers[index] for index in range(len(rows))])
