"""The arguments of a ``RayLLMCollector``, checked before Ray is used, and divided by actor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from torch import nn

from fusedrl.channel.checks import seconds
from fusedrl.collectors.cluster.dialog_actor import Own
from fusedrl.collectors.options import CollectorOptions, Policy
from fusedrl.compat.torchrl import ray_buffer_client
from fusedrl.weights.base import RemoteWeightUpdaterBase


@dataclass(eq=False)
class RayOptions(CollectorOptions):
    """The arguments of :class:`fusedrl.RayLLMCollector`."""

    env: Any
    _: KW_ONLY
    policy: Policy | None = None
    ray_init_config: dict[str, Any] | None = None
    remote_config: dict[str, Any] | list[dict[str, Any]] | None = None
    sync_iter: bool = True
    num_cpus: float | None = None
    num_gpus: float | None = None
    num_collectors: int | None = None
    timeout: float = 300.0

    def __post_init__(self) -> None:
        """Check all of them."""
        super().__post_init__()
        self.refuse_both(("policy_factory", "policy"))
        self.check_dialogs()
        seconds("timeout", self.timeout)
        self._check_actors()
        if self.total < self.count:
            raise ValueError(
                f"total_dialog_turns: expected at least one for each of {self.count} actors, got "
                f"{self.total}; use fewer actors"
            )
        follows = isinstance(self.policy, nn.Module) and len(self.policy.state_dict()) > 0
        if follows and self.has_uuids and self.weight_updater is None:
            raise ValueError(
                "track_policy_version: expected integer versions, which weights have on their way "
                "to actors, got UUIDs; pass True or PolicyVersion('int'), or a weight_updater"
            )

    def _check_actors(self) -> None:
        count = self.count
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"num_collectors: expected a positive number, got {count!r}; 1 is least"
            )
        for name, values in (("env", self.env), ("remote_config", self.remote_config)):
            if isinstance(values, list) and len(values) != count:
                raise ValueError(
                    f"{name}: expected a list of {count}, one for each actor, got {len(values)}; "
                    "pass one for all, or as many as num_collectors"
                )
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
        lists = (one for one in (self.env, self.remote_config) if isinstance(one, list))
        return next(map(len, lists), 1)

    @property
    def extends_here(self) -> bool:
        """Whether the replay buffer is extended in the process of the collector."""
        return self.replay_buffer is not None and ray_buffer_client(self.replay_buffer) is None

    def for_all(self) -> dict[str, Any]:
        """The arguments of :class:`LLMCollector` that the actors share."""
        names = [field.name for field in fields(CollectorOptions)]
        arguments = {name: getattr(self, name) for name in ("policy", *names)}
        sends = isinstance(self.weight_updater, RemoteWeightUpdaterBase)
        if self.flatten_data is None and self.extends_here and not self.yield_only_last_steps:
            arguments["flatten_data"] = True
        return arguments | {
            "replay_buffer": ray_buffer_client(self.replay_buffer),
            "weight_updater": None if sends else self.weight_updater,
            "progress": False,
            "verbose": False,
        }

    def for_each(self, seed: int) -> list[Own]:
        """What differs between actors, whose seeds are ``seed`` and those that follow."""
        turns = self.dialog_turns_per_batch
        if self.sync_iter and turns is not None:
            turns = -(-turns // self.count)
        return [
            Own(
                index,
                self.count,
                seed + index,
                {"env": env, "total_dialog_turns": total, "dialog_turns_per_batch": turns},
            )
            for index, (env, total) in enumerate(
                zip(self._of_each(self.env), self._shares(), strict=True)
            )
        ]

    def of_ray(self) -> list[dict[str, Any]]:
        """Ray's options for each actor, as copies of those that were given."""
        defaults = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        known = {name: value for name, value in defaults.items() if value is not None}
        return [{**known, **(config or {})} for config in self._of_each(self.remote_config)]

    def _of_each(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value] * self.count

    def _shares(self) -> list[int]:
        """The turns of each actor, shared out as equally as possible; -1 if they never end."""
        if self.total == float("inf"):
            return [-1] * self.count
        least, more = divmod(int(self.total), self.count)
        return [least + (index < more) for index in range(self.count)]
