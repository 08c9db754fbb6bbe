"""Arguments under the names of older releases, and those that never existed."""

from __future__ import annotations

import functools
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


def accept_renamed(init: Init) -> Init:
    """Let ``__init__`` take the arguments of :data:`RENAMED` under their old names too.

    A process is warned of each old name once. Both names at a time are a ``TypeError``.
    """

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **given: Any) -> None:
        for old in RENAMED.keys() & given.keys():
            new = RENAMED[old]
            if new in given:
                raise TypeError(
                    f"{old}: expected it or {new}, its name today, got both; drop {old}"
                )
            if old not in _warned:
                _warned.add(old)
                warnings.warn(
                    f"{old} is called {new} today; use that name",
                    DeprecationWarning,
                    stacklevel=2,
                )
            given[new] = given.pop(old)
        init(self, *args, **given)

    return wrapper  # pyright: ignore[reportReturnType]


def refuse(unknown: dict[str, Any]) -> None:
    """Raise ``TypeError`` for an argument that does not exist, naming the one that was meant."""
    for name in unknown:
        remedy = f"; the argument is called {RENAMED[name]}" if name in RENAMED else ""
        raise TypeError(f"{name}: expected a known argument, got an unknown one{remedy}")
