"""The definition of ``exact_kl`` in plain torch: what kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops._dispatch import result_dtype
from fusedrl.ops.token_log_probs.reference import rows_of_tokens


def exact_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    jensen_shannon: bool,
) -> Tensor:
    """From two ``log_softmax`` over the kept rows; 0 elsewhere.

    Computes in float32 (float64 for float64 logits) and differentiates through torch's autograd.
    """
    shape = logits.shape[:-1]
    rows, keep = rows_of_tokens(logits[..., 0], offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    dtype = result_dtype(logits)

    def log_softmax(x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])[rows[kept]].to(dtype)
        x = x.masked_fill(x == -torch.inf, -torch.inf)  # no gradient reaches a banned class
        return torch.log_softmax(x / temperature.to(x), dim=-1)

    divergence = _jensen_shannon if jensen_shannon else _kl
    values = divergence(log_softmax(logits), log_softmax(ref_logits))
    zeros = torch.zeros(rows.numel(), dtype=dtype, device=logits.device)
    return zeros.index_put((kept,), values).view(shape)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    absent = p == 0
    return (p * (log_p.masked_fill(absent, 0) - log_q.masked_fill(absent, 0))).sum(-1)


def _jensen_shannon(log_p: Tensor, log_q: Tensor) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    m = (p + q) / 2
    log_m = m.masked_fill(m == 0, 1).log()
    of_p = p * (log_p.masked_fill(p == 0, 0) - log_m)
    of_q = q * (log_q.masked_fill(q == 0, 0) - log_m)
    return (of_p + of_q).sum(-1) / 2
