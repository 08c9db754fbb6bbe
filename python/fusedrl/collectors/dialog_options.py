"""The arguments of a collector of dialogs, checked against each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader
from fusedrl.collectors.checks import (
    check_mode,
    check_staleness,
    check_total,
    check_whole,
    counts,
)


@dataclass
class DialogOptions:
    """Arguments of :class:`fusedrl.LLMCollector` that depend on each other."""

    policy: Any = None
    policy_factory: Any = None
    dialog_turns_per_batch: int | None = None
    yield_only_last_steps: bool | None = None
    yield_completed_trajectories: bool | None = None
    total_dialog_turns: Any = -1
    flatten_data: bool | None = None
    reset_at_each_iter: bool = False
    replay_buffer: Any = None
    queue: Any = None
    weight_updater: Any = None
    weight_sync_schemes: Any = None
    channel: Any = None
    channel_mode: str = "alias"
    copy_turns: bool = True
    track_policy_version: Any = False
    max_staleness: int | None = None

    def check(self) -> None:
        """Refuse arguments that are invalid, or that exclude each other.

        Raises:
            TypeError, ValueError, RuntimeError: the message names the argument.
        """
        if self.queue is not None and self.replay_buffer is not None:
            raise RuntimeError(
                "queue: expected a queue or a replay_buffer, got both; fill the buffer where the "
                "queue is read"
            )
        if self.policy is not None and self.policy_factory is not None:
            raise TypeError("policy_factory: expected policy or policy_factory, got both; drop one")
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError(
                "weight_updater: expected weight_updater or weight_sync_schemes, got both; drop one"
            )
        self._check_trajectories()
        self._check_numbers()
        self._check_weights()
        if not isinstance(self.track_policy_version, bool | PolicyVersion):
            raise TypeError(
                f"track_policy_version: expected a bool or a PolicyVersion, got "
                f"{type(self.track_policy_version).__name__}; pass True"
            )
        if not isinstance(self.copy_turns, bool):
            raise TypeError(
                f"copy_turns: expected a bool, got {self.copy_turns!r}; False is for policies and "
                "environments that return new tensors at each turn"
            )
        check_staleness(self.max_staleness, self.track_policy_version)

    def _check_trajectories(self) -> None:
        if not self.yield_only_last_steps:
            return
        if self.yield_completed_trajectories is False:
            raise TypeError(
                "yield_completed_trajectories: expected True or None with yield_only_last_steps, "
                "got False; last steps are those of completed trajectories"
            )
        if self.flatten_data is not None:
            raise TypeError(
                f"flatten_data: expected None with yield_only_last_steps, got {self.flatten_data}; "
                "last steps have one dimension as they are"
            )
        if self.reset_at_each_iter:
            raise TypeError(
                "reset_at_each_iter: expected False with yield_only_last_steps, got True; a dialog "
                "may take longer than an iteration"
            )

    def _check_numbers(self) -> None:
        completed = self.yield_completed_trajectories or self.yield_only_last_steps
        if self.dialog_turns_per_batch is None and not completed:
            raise TypeError(
                "dialog_turns_per_batch: expected a number of turns, got None; it may be left out "
                "with yield_completed_trajectories only"
            )
        check_whole(
            "dialog_turns_per_batch", self.dialog_turns_per_batch, 1, "turns", "1 is the least"
        )
        check_total("total_dialog_turns", self.total_dialog_turns, "turns")

    def _check_weights(self) -> None:
        check_mode(self.channel_mode)
        if self.channel is None:
            return
        if not isinstance(self.channel, WeightHandle | WeightReader):
            raise TypeError(
                f"channel: expected a WeightHandle or a WeightReader, got "
                f"{type(self.channel).__name__}; pass channel.handle"
            )
        for name in ("weight_updater", "weight_sync_schemes"):
            if getattr(self, name) is not None:
                raise TypeError(f"{name}: expected it or channel, got both; drop one")
        tracker = self.track_policy_version
        if tracker is not False and not counts(tracker):
            raise ValueError(
                "track_policy_version: expected integer versions, which a channel has, got UUIDs; "
                "pass True or PolicyVersion('int')"
            )
