"""The arguments of a ``RayLLMCollector``, checked before Ray is used, and divided by actor."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from fusedrl.collectors.options import CollectorOptions, Policy, check_patience, check_whole
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
        """Check all of them but what each actor's collector checks."""
        super().__post_init__()
        self.refuse_both(("policy_factory", "policy"))
        self.check_dialogs()
        check_patience(self.timeout, "give the seconds that an actor may take to start, such as 60")
        check_whole("num_collectors", self.num_collectors, 1, "actors", "1 is the least")
        for name in ("env", "remote_config"):
            values = getattr(self, name)
            if isinstance(values, list) and len(values) != self.count:
                raise ValueError(
                    f"{name}: expected a list of {self.count}, one for each actor, got "
                    f"{len(values)}; pass one for all, or as many as num_collectors"
                )

    @property
    def count(self) -> int:
        """The number of actors."""
        if self.num_collectors is not None:
            return self.num_collectors
        lists = (one for one in (self.env, self.remote_config) if isinstance(one, list))
        return next(map(len, lists), 1)

    def for_all(self) -> dict[str, Any]:
        """The arguments of :class:`LLMCollector` that the actors share."""
        names = [field.name for field in fields(CollectorOptions)]
        arguments = {name: getattr(self, name) for name in ("policy", *names)}
        client = ray_buffer_client(self.replay_buffer)
        extends_here = self.replay_buffer is not None and client is None
        if self.flatten_data is None and extends_here and not self.yield_only_last_steps:
            arguments["flatten_data"] = True
        if isinstance(self.weight_updater, RemoteWeightUpdaterBase):
            arguments["weight_updater"] = None
        return arguments | {"replay_buffer": client, "progress": False, "verbose": False}

    def for_each(self, seed: int) -> list[dict[str, Any]]:
        """The arguments that differ between actors, and their seeds: ``seed`` and the next ones."""
        turns = self.dialog_turns_per_batch
        if self.sync_iter and turns is not None:
            turns = -(-turns // self.count)
        least, more = (-1, 0) if self.total == float("inf") else divmod(self.total, self.count)
        return [
            {
                "env": env,
                "seed": seed + index,
                "dialog_turns_per_batch": turns,
                "total_dialog_turns": least + (index < more),
            }
            for index, env in enumerate(self._of_each(self.env))
        ]

    def of_ray(self) -> list[dict[str, Any]]:
        """Ray's options for each actor, as copies of those that were given."""
        defaults = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        known = {name: value for name, value in defaults.items() if value is not None}
        return [{**known, **(config or {})} for config in self._of_each(self.remote_config)]

    def _of_each(self, value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value] * self.count
