"""The private names of accelerate that fusedrl uses."""

from __future__ import annotations

from typing import Any


def has_hook(module: Any) -> bool:
    """Whether accelerate has wrapped a module's forward, to move its inputs and weights."""
    return hasattr(module, "_hf_hook")
