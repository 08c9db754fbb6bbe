"""What we need of accelerate's private names."""

from __future__ import annotations

from typing import Any


def has_hook(module: Any) -> bool:
    """Whether accelerate has wrapped a module's forward, to move what it reads."""
    return hasattr(module, "_hf_hook")
