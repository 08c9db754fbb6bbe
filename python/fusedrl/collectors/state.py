"""Checks a stored state before a collector loads any part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def check_state(state: Any, owners: Mapping[str, Any], tracker: Any, strict: bool) -> None:
    """Raise ``TypeError`` or ``ValueError`` if a collector could not load a whole state.

    Args:
        state: the state of a collector.
        owners: the object that will load each entry, by the name of the entry.
        tracker: the tracker of the collector's versions, if any.
        strict: whether every owner needs an entry with exactly its own names.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state_dict: expected a mapping, got {type(state).__name__}; pass what "
            "collector.state_dict() returned"
        )
    for name in ("frames", "iter"):
        if not isinstance(state.get(name), int):
            raise ValueError(
                f"state_dict: expected an integer {name!r}, got {state.get(name)!r}; pass what "
                "collector.state_dict() returned"
            )
    for name, owner in owners.items():
        if name in state:
            _check_entries(name, state[name], owner.state_dict(), strict)
        elif strict:
            raise ValueError(
                f"state_dict: expected an entry {name!r}, got {sorted(state)}; pass strict=False "
                "to leave it as it is"
            )
    version = state.get("policy_version")
    if version is None or tracker is None:
        return
    if isinstance(version, str) == (tracker.version_type in (int, "int")):
        raise ValueError(
            f"state_dict: expected a version of type {tracker.version_type!r}, got {version!r}; "
            "collect with the version_type that it was stored with"
        )


def _check_entries(name: str, given: Any, own: Any, strict: bool) -> None:
    if strict and given.keys() != own.keys():
        raise ValueError(
            f"state_dict[{name!r}]: expected the entries that there are, got "
            f"{sorted(given.keys() - own.keys())} beside and without "
            f"{sorted(own.keys() - given.keys())}; pass strict=False to take what fits"
        )
    for key in given.keys() & own.keys():
        new, old = given[key], own[key]
        if isinstance(new, Tensor) and isinstance(old, Tensor) and new.shape != old.shape:
            raise ValueError(
                f"state_dict[{name!r}]: expected {key} of shape {tuple(old.shape)}, got "
                f"{tuple(new.shape)}; load the state of a collector of the same model"
            )
