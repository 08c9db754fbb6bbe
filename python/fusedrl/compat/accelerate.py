"""What we need of accelerate's private names."""

from __future__ import annotations

from typing import Any

from fusedrl.compat.library import Library

ACCELERATE = Library("accelerate", tried="1.15.0")


@ACCELERATE.needs("accelerate.hooks:add_hook_to_module._hf_hook")
def has_hook(module: Any) -> bool:
    """Whether accelerate has wrapped a module's forward, to move what it reads."""
    return hasattr(module, "_hf_hook")
