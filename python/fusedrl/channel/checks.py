"""Checks of numeric arguments."""

from __future__ import annotations

from numbers import Real

SLICE_S = 0.02  # longest single wait: signals and dead processes are noticed within it
MAX_VERSION = 2**55 - 1  # the lowest byte of the published 64-bit word is the slot


def seconds(name: str, value: float | None, default: float | None = None) -> float:
    """Check a number of seconds and return it as a float; ``None`` becomes ``default``."""
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number of seconds, got {type(value).__name__}; pass an int or a "
            "float"
        )
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{name}: expected a finite number of seconds, 0 or more, got {value!r}; pass a "
            "number such as 60"
        )
    return float(value)


def count(name: str, value: int, low: int, high: int) -> int:
    """Check that an integer is in ``[low, high]``, and return it."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: expected an int, got {type(value).__name__}; convert it with int()"
        )
    if not low <= value <= high:
        raise ValueError(
            f"{name}: expected {low} to {high}, got {value}; pass a number in this range"
        )
    return value
