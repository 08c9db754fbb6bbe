"""Arguments under names of older releases of torchrl, and unknown arguments."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

RENAMED = {
    "coef": "coeff",
    "gen_log_probs_key": "gen_log_probs_full_key",
    "ref_log_probs_key": "ref_log_probs_full_key",
}
FULL, REF_FULL, COEFF = ("log_probs", "full"), ("ref_log_probs", "full"), 1.0  # defaults
_warned: set[str] = set()


def renamed(name: str, value: Any, default: Any, other: str, unknown: dict[str, Any]) -> Any:
    """The argument ``name``, which ``unknown`` may have under its other name, and then no more.

    The other name gives one ``DeprecationWarning`` in a process. Both together are a ``TypeError``;
    the argument is taken as not given if it is the ``default`` itself.
    """
    if other not in unknown:
        return value
    if value is not default:
        raise TypeError(f"{other}: expected it or {name}, got both; drop {other}")
    if other not in _warned:
        _warned.add(other)
        _warn(f"{other} is called {name} here; use that name")
    return unknown.pop(other)


def _warn(message: str) -> None:
    """Warn, and name the line that called the constructor, not torchrl's metaclass."""
    frame: Any = inspect.currentframe()
    level = 1
    while level < 4 or frame.f_globals.get("__name__", "").startswith("torchrl."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def refuse(unknown: dict[str, Any]) -> None:
    """Raise ``TypeError`` for an unknown argument, naming the one that was probably meant."""
    for name in unknown:
        remedy = f"the argument is called {RENAMED[name]}" if name in RENAMED else "leave it out"
        raise TypeError(f"{name}: expected a known argument, got an unknown one; {remedy}")
