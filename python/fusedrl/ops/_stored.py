"""What the forward pass of a linear head stores for its backward pass."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedrl.ops import _dispatch

# Of the logits of the kept rows; if they take more, none are stored, and the backward pass
# multiplies the head again, which is a quarter of the time of both.
MOST_BYTES = int(os.environ.get("FUSEDRL_STORED_MIB", "256")) << 20
FEW_BYTES = 64 << 20


def stored_bytes(hidden: Tensor, weight: Tensor) -> int:
    """How many bytes the logits of the kept rows may take.

    On a CPU they take no more than the head's own gradient in float32, or few; on CUDA they are a
    tile, which is there anyway. Of traced tensors, whose shapes are those of the inputs, nothing is
    stored: how many rows are kept is not known.
    """
    if not _dispatch.has_values(hidden):
        return 0
    return min(MOST_BYTES, max(FEW_BYTES, 4 * weight.numel())) if hidden.is_cpu else MOST_BYTES


def fake(like: Tensor, most_bytes: int, dtype: torch.dtype) -> Tensor:
    """What is stored: a vector, whose length is known when it is known how many rows are kept."""
    count = torch.library.get_ctx().new_dynamic_size() if most_bytes else 0
    return like.new_empty((count,), dtype=dtype)
