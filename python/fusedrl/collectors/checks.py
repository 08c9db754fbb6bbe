"""Checks of the arguments of collectors, before these touch an environment."""

from __future__ import annotations

import operator
from typing import Any, SupportsIndex

from torchrl.envs import AsyncEnvPool

from fusedrl.collectors.pools import check_pool


def counts(tracker: Any) -> bool:
    """Whether ``track_policy_version`` asks for integer versions."""
    return tracker is True or getattr(tracker, "version_type", None) in (int, "int")


def check_whole(
    name: str, value: Any, least: int, unit: str, remedy: str, optional: bool = True
) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a value is a whole number, ``least`` or more.

    Args:
        name: the name of the argument.
        value: the value that was given.
        least: the smallest number that is accepted.
        unit: what is counted.
        remedy: the end of the message, which says what to do.
        optional: whether ``None`` is accepted.
    """
    if value is None and optional:
        return
    if not isinstance(value, SupportsIndex) or isinstance(value, bool | float):
        raise TypeError(f"{name}: expected a whole number of {unit}, got {value!r}; {remedy}")
    if operator.index(value) < least:
        raise ValueError(f"{name}: expected {least} or more {unit}, got {value!r}; {remedy}")


def check_total(name: str, value: Any, unit: str) -> None:
    """As :func:`check_whole`, for a total, which may be a float such as 1e6, -1 or infinity."""
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
    """Raise ``ValueError`` unless a ``channel_mode`` is ``"alias"`` or ``"copy"``."""
    if mode not in ("alias", "copy"):
        raise ValueError(
            f"channel_mode: expected 'alias' or 'copy', got {mode!r}; alias takes no memory, copy "
            "keeps the addresses of the parameters"
        )


def check_environment(env: Any, async_envs: bool | None, completed: bool) -> None:
    """Raise if the environment cannot do what is asked of it."""
    pool = isinstance(env, AsyncEnvPool)
    if pool:
        check_pool(env)
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
