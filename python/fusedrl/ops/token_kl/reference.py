"""Reference implementation of ``token_kl`` in plain torch, which kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor


def estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token KL estimate from ``d = ref_log_probs - log_probs``."""
    d = ref_log_probs - log_probs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d * d / 2
    if estimator == "k3":
        series = d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5)))
        # inf is the limit at inf, where inf - inf would be NaN.
        far = torch.where(d == torch.inf, d, torch.expm1(d) - d)
        return torch.where(d.abs() < 1e-3, series, far)
    return d.abs()


def token_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    reward: Tensor | None,
    coeff: Tensor,
    estimator: str,
    nan_missing: bool,
) -> tuple[Tensor, Tensor | None]:
    """KL of every kept token (0 elsewhere) and, with ``reward``, ``reward - coeff * kl``.

    Computes in float32 (float64 for float64 inputs) and returns the dtypes of the inputs.
    """
    out_dtype = torch.promote_types(log_probs.dtype, ref_log_probs.dtype)
    dtype = torch.float64 if out_dtype == torch.float64 else torch.float32
    p, q = log_probs.to(dtype), ref_log_probs.to(dtype)
    drop = torch.zeros_like(p, dtype=torch.bool) if mask is None else ~mask
    if nan_missing:
        drop = drop | p.isnan() | q.isnan()
    # Filled before the formula: a dropped NaN must reach neither the result nor the gradient.
    kl = estimate(p.masked_fill(drop, 0), q.masked_fill(drop, 0), estimator)
    if reward is None:
        return kl.to(out_dtype), None
    reward_dtype = torch.promote_types(out_dtype, reward.dtype)
    penalised = torch.where(drop, reward.to(dtype), reward.to(dtype) - coeff.to(kl) * kl)
    return kl.to(out_dtype), penalised.to(reward_dtype)
