"""The definition of ``linear_policy_loss`` in plain torch: what kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusedrl.ops.linear_policy_loss.losses import (
    PolicyBatch,
    Sequences,
    Surrogate,
    TermWeights,
    log_ratios,
)
from fusedrl.ops.token_kl.reference import estimate


def surrogate_of(
    log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, surrogate: Surrogate
) -> Tensor:
    r"""The term of the advantages :math:`A` for each token, with :math:`r = e^{\log ratio}`.

    ``"clip"``: :math:`-\min(\min(r, most) A, clamp(r, low, high) A)`; ``"clipped_ratio"``:
    :math:`-clamp(r, low, high) A`; ``"cispo"``: :math:`-clamp(r, low, high) A \log p` with a
    constant ratio; ``"reinforce"``: :math:`-A \log p`.
    """
    if surrogate.kind == "reinforce":
        return -advantages * log_probs
    low, high, most = surrogate.low, surrogate.high, surrogate.most
    with torch.no_grad():
        ratio = log_ratio.exp()
        bounded = ratio.clamp(low, high)
        flat = (ratio < low) | (ratio > high)
        if surrogate.kind == "clip":
            free = ratio.clamp(max=most) * advantages
            flat = (ratio > most) | (bounded * advantages < free)
    if surrogate.kind == "cispo":
        return -bounded.detach() * advantages * log_probs  # nor a forward-mode tangent
    # The exponential of a ratio that is clipped may be infinite, and 0 times that is NaN.
    ratio = torch.where(flat, log_ratio.detach(), log_ratio).exp()
    bounded = ratio.clamp(low, high)
    if surrogate.kind == "clipped_ratio":
        return -bounded * advantages
    return -torch.minimum(ratio.clamp(max=most) * advantages, bounded * advantages)


def policy_terms(
    log_probs: Tensor,
    entropy: Tensor | None,
    batch: PolicyBatch,
    weights: TermWeights,
    surrogate: Surrogate,
    level: str = "token",
    sequences: Sequences | None = None,
) -> Tensor:
    """The weighted objective, KL to the reference, KL to the old policy and entropy, ``[4]``.

    Differentiates through torch's autograd. A token of weight 0 contributes neither value nor
    gradient, whatever its entries are.
    """
    dtype = log_probs.dtype
    old = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs.to(dtype)
    log_ratio = log_probs - old
    if level != "token":
        assert sequences is not None
        log_ratio = log_ratios(log_ratio, level, sequences)

    def term(weight: Tensor | None, of: Callable[..., Tensor], *columns: Tensor | None) -> Tensor:
        if weight is None or any(column is None for column in columns):
            return log_probs.new_zeros(())
        counts = weight != 0
        # Selected before the formula: a NaN that does not count must not reach the gradient.
        selected = (column[counts] for column in columns if column is not None)
        return (of(*selected) * weight[counts].to(dtype)).sum()

    def divergence(p: Tensor, q: Tensor) -> Tensor:
        return estimate(p, q.to(dtype), surrogate.estimator)

    def objective(p: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        return surrogate_of(p, ratio, advantages.to(dtype), surrogate)

    terms = (
        term(weights.objective, objective, log_probs, log_ratio, batch.advantages),
        term(weights.kl, divergence, log_probs, batch.ref_log_probs),
        term(weights.old_kl, divergence, log_probs, old),
        term(weights.entropy, lambda rows: rows, entropy),
    )
    return torch.stack(terms)
