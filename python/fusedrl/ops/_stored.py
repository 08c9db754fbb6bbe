"""What the forward pass of a linear head stores for its backward pass."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from fusedrl.ops import _dispatch

# Of the logits of the kept rows; if they take more, none are stored, and the backward pass
# multiplies the head again, which is a quarter of the time of both. On CUDA they are a tile, which
# is there anyway.
MOST_BYTES = int(os.environ.get("FUSEDRL_STORED_MIB", "256")) << 20


def stored_bytes(hidden: Tensor) -> int:
    """How many bytes the logits of the kept rows may take.

    Of traced tensors, whose shapes are those of the inputs, nothing is stored: how many rows are
    kept is not known.
    """
    return MOST_BYTES if _dispatch.has_values(hidden) else 0


def fake(like: Tensor, most_bytes: int, dtype: torch.dtype) -> Tensor:
    """What is stored: a vector, whose length is known when it is known how many rows are kept."""
    count = torch.library.get_ctx().new_dynamic_size() if most_bytes else 0
    return like.new_empty((count,), dtype=dtype)
