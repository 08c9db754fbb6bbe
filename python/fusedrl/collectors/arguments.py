"""What a collector refuses before it touches an environment."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from torchrl.envs import AsyncEnvPool
from torchrl.envs.llm.transforms.policy_version import PolicyVersion

from fusedrl.channel import WeightHandle, WeightReader


def check_arguments(given: dict[str, Any]) -> None:
    """Raise ``TypeError``, ``ValueError`` or ``RuntimeError`` for what does not go together."""
    if given["queue"] is not None and given["replay_buffer"] is not None:
        raise RuntimeError(
            "queue: expected a queue or a replay_buffer, got both; fill the buffer where the queue "
            "is read"
        )
    if given["policy"] is not None and given["policy_factory"] is not None:
        raise TypeError("policy_factory: expected policy or policy_factory, got both; drop one")
    if given["weight_updater"] is not None and given["weight_sync_schemes"] is not None:
        raise TypeError(
            "weight_updater: expected weight_updater or weight_sync_schemes, got both; drop one"
        )
    _check_trajectories(given)
    _check_numbers(given)
    _check_weights(given)
    tracker = given["track_policy_version"]
    if not isinstance(tracker, bool | PolicyVersion):
        raise TypeError(
            f"track_policy_version: expected a bool or a PolicyVersion, got "
            f"{type(tracker).__name__}; pass True"
        )
    check_staleness(given["max_staleness"], tracker)


def counts(tracker: Any) -> bool:
    """Whether ``track_policy_version`` asks for integer versions."""
    return tracker is True or getattr(tracker, "version_type", None) in (int, "int")


def _check_weights(given: dict[str, Any]) -> None:
    channel, tracker = given["channel"], given["track_policy_version"]
    check_mode(given["channel_mode"])
    if channel is None:
        return
    if not isinstance(channel, WeightHandle | WeightReader):
        raise TypeError(
            f"channel: expected a WeightHandle or a WeightReader, got {type(channel).__name__}; "
            "pass channel.handle"
        )
    for name in ("weight_updater", "weight_sync_schemes"):
        if given[name] is not None:
            raise TypeError(f"{name}: expected it or channel, got both; drop one")
    if tracker is not False and not counts(tracker):
        raise ValueError(
            "track_policy_version: expected integer versions, which a channel has, got UUIDs; pass "
            "True or PolicyVersion('int')"
        )


def _check_trajectories(given: dict[str, Any]) -> None:
    if not given["yield_only_last_steps"]:
        return
    if given["yield_completed_trajectories"] is False:
        raise TypeError(
            "yield_completed_trajectories: expected True or None with yield_only_last_steps, got "
            "False; last steps are those of completed trajectories"
        )
    if given["flatten_data"] is not None:
        raise TypeError(
            f"flatten_data: expected None with yield_only_last_steps, got {given['flatten_data']}; "
            "last steps have one dimension as they are"
        )
    if given["reset_at_each_iter"]:
        raise TypeError(
            "reset_at_each_iter: expected False with yield_only_last_steps, got True; a dialog may "
            "take longer than an iteration"
        )


def check_whole(
    name: str, value: Any, least: int, unit: str, remedy: str, optional: bool = True
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a value is a whole number, ``least`` or more.

    Args:
        name: of the argument.
        value: what came.
        least: the smallest number that is taken.
        unit: what is counted.
        remedy: the end of the message.
        optional: whether ``None`` is taken.
    """
    if value is None and optional:
        return
    if not isinstance(value, SupportsIndex) or isinstance(value, bool | float):
        raise TypeError(f"{name}: expected a whole number of {unit}, got {value!r}; {remedy}")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected {least} or more {unit}, got {value!r}; {remedy}")


def check_total(name: str, value: Any, unit: str) -> None:
    """As :func:`check_whole`, of a total: as torchrl's, 1e6 is one, and infinity never ends."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value not in (-1, float("inf")):
        check_whole(name, value, 1, unit, "-1 never ends")


def check_seconds(name: str, value: Any, remedy: str) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a value is ``None`` or a number above 0."""
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name}: expected a number of seconds, got {value!r}; {remedy}")
    if not value > 0:
        raise ValueError(f"{name}: expected seconds above 0, got {value!r}; {remedy}")


def check_staleness(value: Any, tracker: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a ``max_staleness`` that cannot be counted."""
    if value is None:
        return
    check_whole("max_staleness", value, 0, "versions", "None keeps everything")
    if not counts(tracker):
        raise ValueError(
            "max_staleness: expected integer versions to count back from, got "
            f"track_policy_version={tracker!r}; pass True or PolicyVersion('int')"
        )


def check_mode(mode: Any) -> None:
    """Raise ``ValueError`` unless a ``channel_mode`` is one."""
    if mode not in ("alias", "copy"):
        raise ValueError(
            f"channel_mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
            "keeps the addresses of the parameters"
        )


def _check_numbers(given: dict[str, Any]) -> None:
    completed = given["yield_completed_trajectories"] or given["yield_only_last_steps"]
    wanted, total = given["dialog_turns_per_batch"], given["total_dialog_turns"]
    if wanted is None and not completed:
        raise TypeError(
            "dialog_turns_per_batch: expected a number of turns, got None; it may be left out with "
            "yield_completed_trajectories only"
        )
    check_whole("dialog_turns_per_batch", wanted, 1, "turns", "1 is the least")
    check_total("total_dialog_turns", total, "turns")


def check_environment(env: Any, async_envs: bool | None, completed: bool) -> None:
    """Raise if the environment cannot do what is asked of it."""
    pool = isinstance(env, AsyncEnvPool)
    if async_envs and not pool:
        raise RuntimeError(
            f"async_envs: expected an AsyncEnvPool as env, got {type(env).__name__}; make it "
            "AsyncEnvPool([make_env] * n), or leave async_envs out"
        )
    if completed and not pool and len(env.batch_size) != 1:
        raise ValueError(
            "yield_completed_trajectories: expected an env with one batch dimension, got "
            f"batch_size={tuple(env.batch_size)}; give the env batch_size=(n,) for n dialogs"
        )
