"""Checks of the arguments of weight updaters and schemes."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase


def check_weights(name: str, weights: Any) -> None:
    """Raise ``TypeError`` unless ``weights`` are a tensordict."""
    if not isinstance(weights, TensorDictBase):
        raise TypeError(
            f"{name}: expected a tensordict, got {type(weights).__name__}; take a policy's weights "
            "with TensorDict.from_module(policy)"
        )


def check_getter(name: str, getter: Any) -> None:
    """Raise ``TypeError`` unless ``getter`` is a function or ``None``."""
    if getter is not None and not callable(getter):
        raise TypeError(
            f"{name}: expected a function that returns weights, or None, got "
            f"{type(getter).__name__}; wrap it: lambda: weights"
        )
