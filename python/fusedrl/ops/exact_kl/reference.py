"""Reference implementation of ``exact_kl`` in plain torch, which kernels are tested against."""

from __future__ import annotations

import math

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
    beta: float,
    entropies: bool,
) -> tuple[Tensor, Tensor | None]:
    """The divergence, from two ``log_softmax`` over the kept rows (0 elsewhere), and the entropies.

    With p from the logits and q from the reference's, it is KL(p || q) if ``beta`` is 1, else
    ``(1 - beta) KL(p || m) + beta KL(q || m)`` with ``m = (1 - beta) p + beta q``. The entropies of
    p and q are the last dimension of the second result. Everything is computed in float32 (float64
    for float64 logits) and differentiable.
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

    def of_tokens(values: Tensor) -> Tensor:
        zeros = torch.zeros((rows.numel(), *values.shape[1:]), dtype=dtype, device=logits.device)
        return zeros.index_put((kept,), values).view(*shape, *values.shape[1:])

    log_p, log_q = log_softmax(logits), log_softmax(ref_logits)
    kl = of_tokens(divergence_of(log_p, log_q, beta))
    if not entropies:
        return kl, None
    return kl, of_tokens(torch.stack([_entropy(log_p), _entropy(log_q)], dim=-1))


def divergence_of(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """The divergence for ``beta``; the last dimension of the log-probs is the vocabulary."""
    return _kl(log_p, log_q) if beta == 1 else _jensen_shannon(log_p, log_q, beta)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    absent = p == 0
    return (p * (log_p.masked_fill(absent, 0) - log_q.masked_fill(absent, 0))).sum(-1)


def _entropy(log_p: Tensor) -> Tensor:
    p = log_p.exp()
    return -(p * log_p.masked_fill(p == 0, 0)).sum(-1)


def _jensen_shannon(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    p, q = log_p.exp(), log_q.exp()
    no_p, no_q = p == 0, q == 0
    difference = torch.where(no_p | no_q, 0.0, log_q - log_p)
    m_over_p = _log_mixture(difference.masked_fill(no_q & ~no_p, -torch.inf), 1 - beta, beta)
    m_over_q = _log_mixture(-difference.masked_fill(no_p & ~no_q, torch.inf), beta, 1 - beta)
    return -((1 - beta) * p * m_over_p + beta * q * m_over_q).sum(-1)


def _log_mixture(x: Tensor, rest: float, share: float) -> Tensor:
    """``log(rest + share * e^x)`` for ``rest + share = 1``, accurate near 0."""
    near = x < 60  # e^x does not overflow
    if share > 0.5:
        near &= x > -1  # the mixture is not close to 0
    small = torch.log1p(share * torch.expm1(torch.where(near, x, 0.0)))
    far = torch.where(near, 0.0, x) + math.log(share)
    return torch.where(near, small, torch.logaddexp(far, torch.full_like(far, math.log(rest))))
