"""What the forward pass of a linear head stores for its backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops import _dispatch

# The backward pass would multiply the head again, which is a quarter of the time of both. Without a
# bound the memory would grow like the logits, which is what these ops are there to avoid.
MOST_BYTES = 64 << 20
MOST_BYTES_ON_CUDA = 256 << 20  # a tile, which the forward pass has in memory anyway


def stored_bytes(hidden: Tensor) -> int:
    """How many bytes the logits of the kept rows may take; if they take more, none are stored.

    Of traced tensors, whose shapes are those of the inputs, nothing is stored: how many rows are
    kept is not known.
    """
    if not _dispatch.has_values(hidden):
        return 0
    return MOST_BYTES if hidden.is_cpu else MOST_BYTES_ON_CUDA


def fake(like: Tensor, most_bytes: int, dtype: torch.dtype) -> Tensor:
    """What is stored: a vector, whose length is known when it is known how many rows are kept."""
    count = torch.library.get_ctx().new_dynamic_size() if most_bytes else 0
    return like.new_empty((count,), dtype=dtype)
