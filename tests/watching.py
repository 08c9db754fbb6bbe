"""Hooks that watch a model without making it slow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watch:
    """Calls ``function`` as a hook that torch has defined; others may change what they see."""

    __module__ = "torch"

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)
