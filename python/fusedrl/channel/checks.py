"""Checks of what channels are made from."""

from __future__ import annotations

from numbers import Real

MAX_VERSION = 2**55 - 1  # of eight bytes, one is the slot's


def seconds(name: str, value: float) -> float:
    """``value``, where it ends a wait.

    Raises:
        TypeError: it is not a number.
        ValueError: it is negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(
            f"{name}: expected a number of seconds, got {type(value).__name__}; pass a float"
        )
    if not 0 <= value < float("inf"):
        raise ValueError(
            f"{name}: expected a finite number of seconds, 0 or more, got {value!r}; every wait "
            "has to end"
        )
    return float(value)


def count(name: str, value: int, low: int, high: int) -> int:
    """``value``, where it is an integer from ``low`` to ``high``.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}: expected an int, got {type(value).__name__}; convert it with int()"
        )
    if not low <= value <= high:
        raise ValueError(
            f"{name}: expected {low} to {high}, got {value}; pass a number in that range"
        )
    return value
