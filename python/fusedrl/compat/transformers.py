"""What we need of transformers' private names."""

from __future__ import annotations

from typing import Any

from fusedrl.compat.library import Library

TRANSFORMERS = Library("transformers", tried="5.23.0")


@TRANSFORMERS.needs("transformers:PretrainedConfig._attn_implementation")
def attention_of(config: Any) -> str | None:
    """The implementation of attention that a configuration names, if it does."""
    return getattr(config, "_attn_implementation", None)
