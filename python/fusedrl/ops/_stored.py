"""What the forward pass of a linear head stores for its backward pass."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedrl.ops import _dispatch

# Limit for the logits of the kept rows. Above it none are stored, and the backward pass recomputes
# them, which takes a quarter of the time of both passes.
MOST_BYTES = int(os.environ.get("FUSEDRL_STORED_MIB", "256")) << 20
FEW_BYTES = 64 << 20


def stored_bytes(hidden: Tensor, weight: Tensor) -> int:
    """The limit in bytes for stored logits of the kept rows.

    On a CPU it is at most the size of the head's float32 gradient, or ``FEW_BYTES``; on CUDA the
    stored logits are a tile that exists anyway. Under tracing nothing is stored, as the number of
    kept rows is unknown.
    """
    if not _dispatch.has_values(hidden):
        return 0
    return min(MOST_BYTES, max(FEW_BYTES, 4 * weight.numel())) if hidden.is_cpu else MOST_BYTES


def fake(like: Tensor, most_bytes: int, dtype: torch.dtype) -> Tensor:
    """A fake of the stored vector, whose length depends on the number of kept rows."""
    count = torch.library.get_ctx().new_dynamic_size() if most_bytes else 0
    return like.new_empty((count,), dtype=dtype)
