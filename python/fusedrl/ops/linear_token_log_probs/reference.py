"""The definition of ``linear_token_log_probs`` in plain torch: what kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops.token_log_probs import reference


def head_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Logits ``scale * (hidden W^T + bias)``, capped by ``softcap * tanh(logits / softcap)``.

    In float32 (float64 for float64 input) whatever the dtype of the arguments; a ``softcap`` of 0
    is none.
    """
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    logits = torch.nn.functional.linear(
        hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    )
    logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    scale: float,
    softcap: float,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """``token_log_probs`` of the kept rows' logits; 0 elsewhere."""
    rows, keep = reference.rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    logits = head_logits(
        hidden.reshape(-1, hidden.shape[-1])[rows[kept]], weight, bias, scale, softcap
    )
    results = reference.token_log_probs(
        logits, tokens.flatten()[kept], None, None, False, temperature, entropy
    )
    zeros = torch.zeros(tokens.numel(), dtype=logits.dtype, device=hidden.device)
    log_probs, row_entropy = (
        None if x is None else zeros.index_put((kept,), x).view(tokens.shape) for x in results
    )
    assert log_probs is not None
    return log_probs, row_entropy
