"""Arguments under names of older releases of torchrl, and unknown arguments."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Init = TypeVar("Init", bound=Callable[..., None])

RENAMED = {
    "coef": "coeff",
    "gen_log_probs_key": "gen_log_probs_full_key",
    "ref_log_probs_key": "ref_log_probs_full_key",
}
_warned: set[str] = set()


def accept_renamed(names: dict[str, str] = RENAMED) -> Callable[[Init], Init]:
    """Let ``__init__`` take arguments under other names too: ``names`` maps these to its own.

    Each other name gives one ``DeprecationWarning`` in a process. Both names together are a
    ``TypeError``.
    """

    def decorate(init: Init) -> Init:
        @functools.wraps(init)
        def wrapper(self: Any, *args: Any, **given: Any) -> None:
            for other in names.keys() & given.keys():
                name = names[other]
                if name in given:
                    raise TypeError(f"{other}: expected it or {name}, got both; drop {other}")
                if other not in _warned:
                    _warned.add(other)
                    _warn(f"{other} is called {name} here; use that name")
                given[name] = given.pop(other)
            init(self, *args, **given)

        return wrapper  # pyright: ignore[reportReturnType]

    return decorate


def _warn(message: str) -> None:
    """Warn, and name the line that called the constructor, not torchrl's metaclass."""
    frame: Any = inspect.currentframe()
    level = 1
    while level < 3 or frame.f_globals.get("__name__", "").startswith("torchrl."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DeprecationWarning, stacklevel=level)


def refuse(unknown: dict[str, Any]) -> None:
    """Raise ``TypeError`` for an unknown argument, naming the one that was probably meant."""
    for name in unknown:
        remedy = f"the argument is called {RENAMED[name]}" if name in RENAMED else "leave it out"
        raise TypeError(f"{name}: expected a known argument, got an unknown one; {remedy}")
