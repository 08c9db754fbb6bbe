"""What a collector on a Ray cluster refuses before it touches Ray."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn

from fusedrl.collectors.options import DialogOptions
from fusedrl.weights.arguments import check_timeout


def check_ray_arguments(given: dict[str, Any]) -> int:
    """The number of actors.

    Raises:
        TypeError, ValueError, RuntimeError: what does not go together.
    """
    names = {field.name for field in fields(DialogOptions)}
    DialogOptions(**{name: given[name] for name in names & given.keys()}).check()
    check_timeout(given["timeout"])
    count = _count(given)
    total = given["total_dialog_turns"]
    if 0 <= total < count:
        raise ValueError(
            f"total_dialog_turns: expected at least one for each of {count} actors, got {total}; "
            "use fewer actors"
        )
    tracker, policy = given["track_policy_version"], given["policy"]
    follows = isinstance(policy, nn.Module) and len(policy.state_dict()) > 0
    uuids = getattr(tracker, "version_type", int) not in (int, "int")
    if follows and uuids and given["weight_updater"] is None:
        raise ValueError(
            "track_policy_version: expected integer versions, which weights have on their way to "
            "actors, got UUIDs; pass True or PolicyVersion('int'), or a weight_updater"
        )
    return count


def _count(given: dict[str, Any]) -> int:
    lists = {
        name: len(given[name]) for name in ("env", "remote_config") if isinstance(given[name], list)
    }
    count = given["num_collectors"]
    if count is None:
        count = next(iter(lists.values()), 1)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"num_collectors: expected a positive number, got {count!r}; 1 is least")
    for name, length in lists.items():
        if length != count:
            raise ValueError(
                f"{name}: expected a list of {count}, one for each actor, got {length}; pass one "
                "for all, or as many as num_collectors"
            )
    configs = given["remote_config"]
    for config in configs if isinstance(configs, list) else [configs]:
        if (config or {}).get("max_restarts"):
            raise ValueError(
                f"remote_config: expected max_restarts=0, got {config['max_restarts']}; an actor "
                "that Ray starts again has no collector, make another one and load its state"
            )
    return count


def shares(total: int, count: int) -> list[int]:
    """A number of turns shared out equally; all of -1 where it never ends."""
    if total == -1:
        return [-1] * count
    return [total // count + (index < total % count) for index in range(count)]


def ray_options(
    remote_config: dict[str, Any] | list[dict[str, Any]] | None,
    count: int,
    num_cpus: float | None,
    num_gpus: float | None,
) -> list[dict[str, Any]]:
    """Ray's options of each actor, what is given left as it is."""
    configs = remote_config if isinstance(remote_config, list) else [remote_config] * count
    defaults = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    known = {name: value for name, value in defaults.items() if value is not None}
    return [{**known, **(config or {})} for config in configs]
