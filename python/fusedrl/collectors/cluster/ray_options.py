"""The arguments of a ``RayLLMCollector``, checked before Ray is used, and divided by actor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from fusedrl.collectors.dialog_options import DialogOptions
from fusedrl.collectors.progress import check_progress
from fusedrl.weights.base import RemoteWeightUpdaterBase
from fusedrl.weights.checks import check_timeout

# The arguments of an actor's collector that are the same for all actors.
AS_GIVEN = (
    *("policy", "policy_factory", "postproc", "async_envs", "reset_at_each_iter"),
    *("yield_only_last_steps", "yield_completed_trajectories", "track_policy_version"),
    *("channel_mode", "copy_turns", "max_staleness"),
)


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The arguments of :class:`fusedrl.RayLLMCollector`, whose docstring explains them.

    Raises:
        TypeError, ValueError, RuntimeError, ImportError: arguments are invalid or exclude each
            other, or a package is missing.
    """

    env: Any
    policy: Callable[..., Any] | None
    policy_factory: Callable[[], Callable[..., Any]] | None
    dialog_turns_per_batch: int | None
    total_dialog_turns: float | None
    yield_only_last_steps: bool | None
    yield_completed_trajectories: bool | None
    postproc: Callable[..., Any] | None
    async_envs: bool | None
    replay_buffer: Any
    reset_at_each_iter: bool
    flatten_data: bool | None
    weight_updater: Any
    ray_init_config: dict[str, Any] | None
    remote_config: dict[str, Any] | list[dict[str, Any]] | None
    track_policy_version: Any
    sync_iter: bool
    progress: bool
    num_cpus: float | None
    num_gpus: float | None
    num_collectors: int | None
    channel_mode: str
    copy_turns: bool
    max_staleness: int | None
    timeout: float

    def __post_init__(self) -> None:
        """Check each argument, and that they fit together."""
        shared = {field.name for field in fields(DialogOptions)} & vars(self).keys()
        DialogOptions(**{name: getattr(self, name) for name in shared}).check()
        check_progress(self.progress)
        check_timeout(self.timeout)
        self._check_count()
        self._check_restarts()
        if self.total < self.count:
            raise ValueError(
                f"total_dialog_turns: expected at least one for each of {self.count} actors, got "
                f"{self.total}; use fewer actors"
            )
        follows = isinstance(self.policy, nn.Module) and len(self.policy.state_dict()) > 0
        uuids = getattr(self.track_policy_version, "version_type", int) not in (int, "int")
        if follows and uuids and self.weight_updater is None:
            raise ValueError(
                "track_policy_version: expected integer versions, which weights have on their way "
                "to actors, got UUIDs; pass True or PolicyVersion('int'), or a weight_updater"
            )

    def _check_count(self) -> None:
        count = self.count
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"num_collectors: expected a positive number, got {count!r}; 1 is least"
            )
        for name, given in (("env", self.env), ("remote_config", self.remote_config)):
            if isinstance(given, list) and len(given) != count:
                raise ValueError(
                    f"{name}: expected a list of {count}, one for each actor, got {len(given)}; "
                    "pass one for all, or as many as num_collectors"
                )

    def _check_restarts(self) -> None:
        for config in self._of_each(self.remote_config):
            if (config or {}).get("max_restarts"):
                raise ValueError(
                    f"remote_config: expected max_restarts=0, got {config['max_restarts']}; an "
                    "actor that Ray starts again has no collector, make another one and load its "
                    "state"
                )

    @property
    def count(self) -> int:
        """The number of actors."""
        if self.num_collectors is not None:
            return self.num_collectors
        lists = (given for given in (self.env, self.remote_config) if isinstance(given, list))
        return next(map(len, lists), 1)

    @property
    def total(self) -> float:
        """The number of turns to run in all; infinite if they never end."""
        total = self.total_dialog_turns
        return float("inf") if total is None or total in (-1, float("inf")) else int(total)

    @property
    def remote_buffer(self) -> Any:
        """The buffer that actors extend; ``None`` if they extend none."""
        return buffer_client(self.replay_buffer)

    @property
    def extends_here(self) -> bool:
        """Whether the replay buffer is extended in the process of the collector."""
        return self.replay_buffer is not None and self.remote_buffer is None

    def for_all(self) -> dict[str, Any]:
        """The arguments of :class:`LLMCollector` that the actors share."""
        flatten = self.flatten_data
        if flatten is None and self.extends_here and not self.yield_only_last_steps:
            flatten = True
        sends = isinstance(self.weight_updater, RemoteWeightUpdaterBase)
        return {name: getattr(self, name) for name in AS_GIVEN} | {
            "replay_buffer": self.remote_buffer,
            "flatten_data": flatten,
            "weight_updater": None if sends else self.weight_updater,
        }

    def for_each(self) -> list[dict[str, Any]]:
        """The arguments of :class:`LLMCollector` that differ between actors."""
        turns = self.dialog_turns_per_batch
        if self.sync_iter and turns is not None:
            turns = -(-turns // self.count)
        return [
            {"env": env, "total_dialog_turns": total, "dialog_turns_per_batch": turns}
            for env, total in zip(self._of_each(self.env), self._shares(), strict=True)
        ]

    def of_ray(self) -> list[dict[str, Any]]:
        """Ray's options for each actor, as copies of those that were given."""
        defaults = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        known = {name: value for name, value in defaults.items() if value is not None}
        return [{**known, **(config or {})} for config in self._of_each(self.remote_config)]

    def _of_each(self, given: Any) -> list[Any]:
        return given if isinstance(given, list) else [given] * self.count

    def _shares(self) -> list[int]:
        """The turns of each actor, shared out as equally as possible; -1 if they never end."""
        if self.total == float("inf"):
            return [-1] * self.count
        least, more = divmod(int(self.total), self.count)
        return [least + (index < more) for index in range(self.count)]


def buffer_client(replay_buffer: Any) -> Any:
    """The client by which actors extend a buffer that is an actor itself; otherwise ``None``."""
    from torchrl.data.replay_buffers.ray_buffer import (
        RayReplayBuffer,
        _LazyDistributedReplayClient,
        _RayReplayBufferClient,
    )

    if isinstance(replay_buffer, _RayReplayBufferClient | _LazyDistributedReplayClient):
        return replay_buffer
    return replay_buffer.client() if isinstance(replay_buffer, RayReplayBuffer) else None
