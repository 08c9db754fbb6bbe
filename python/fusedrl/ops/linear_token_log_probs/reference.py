"""Reference implementation of ``linear_token_log_probs``, which kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops._head import Head, reference_logits
from fusedrl.ops.token_log_probs import reference


def linear_token_log_probs(
    head: Head,
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """``token_log_probs`` of the logits of the kept rows; 0 for other tokens."""
    rows, keep = reference.rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    targets = tokens.flatten()[kept]
    reference.check_targets(targets, kept, tokens.shape, len(head.weight))
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])[rows[kept]]
    logits = reference_logits(head._replace(hidden=hidden))
    results = reference.token_log_probs(logits, targets, None, None, False, temperature, entropy)
    zeros = torch.zeros(tokens.numel(), dtype=logits.dtype, device=logits.device)
    log_probs, row_entropy = (
        None if x is None else zeros.index_put((kept,), x).view(tokens.shape) for x in results
    )
    assert log_probs is not None
    return log_probs, row_entropy
