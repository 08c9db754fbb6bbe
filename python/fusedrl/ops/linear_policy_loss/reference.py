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
from fusedrl.ops.token_kl.reference import estimate, estimate_slope


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
    if surrogate.kind == "cispo":
        bounded = ratio.clamp(low, high).detach()  # nor a forward-mode tangent
        return -bounded * advantages * log_probs
    flat = _is_flat(ratio, advantages, surrogate)
    # The exponential of a ratio that is clipped may be infinite, and 0 times that is NaN.
    ratio = torch.where(flat, log_ratio.detach(), log_ratio).exp()
    bounded = ratio.clamp(low, high)
    if surrogate.kind == "clipped_ratio":
        return -bounded * advantages
    return -torch.minimum(ratio.clamp(max=most) * advantages, bounded * advantages)


def _is_flat(ratio: Tensor, advantages: Tensor, surrogate: Surrogate) -> Tensor:
    """Where a bound of the ratio leaves its term without a slope."""
    low, high, most = surrogate.low, surrogate.high, surrogate.most
    if surrogate.kind == "clipped_ratio":
        return (ratio < low) | (ratio > high)
    free = ratio.clamp(max=most) * advantages
    return (ratio > most) | (ratio.clamp(low, high) * advantages < free)


def slope_of(log_ratio: Tensor, advantages: Tensor, surrogate: Surrogate) -> Tensor:
    """The derivative of :func:`surrogate_of` by the log-prob that it, or its ratio, is of."""
    if surrogate.kind == "reinforce":
        return -advantages
    ratio = log_ratio.exp()
    if surrogate.kind == "cispo":
        return -ratio.clamp(surrogate.low, surrogate.high) * advantages
    return torch.where(_is_flat(ratio, advantages, surrogate), 0, -ratio * advantages)


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
        # Before the formula: a NaN that does not count must not reach the gradient.
        finite = (torch.where(counts, column, 0) for column in columns if column is not None)
        return (of(*finite) * weight.to(dtype)).sum()

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


@torch.no_grad()
def policy_slopes(
    log_probs: Tensor,
    batch: PolicyBatch,
    weights: TermWeights,
    surrogate: Surrogate,
    level: str,
    sequences: Sequences,
) -> Tensor:
    """The derivative of the sum of :func:`policy_terms` by each log-prob, without autograd.

    Saved-tensor hooks of a caller, checkpoints among them, would reach what autograd saves.
    """
    dtype = log_probs.dtype
    old = log_probs if batch.old_log_probs is None else batch.old_log_probs.to(dtype)

    def weighed(weight: Tensor, slope: Tensor) -> Tensor:
        return torch.where(weight != 0, slope * weight.to(dtype), 0)

    log_ratio = log_ratios(log_probs - old, level, sequences)
    slopes = weighed(weights.objective, slope_of(log_ratio, batch.advantages.to(dtype), surrogate))
    if level != "token":
        of_sequences = sequences.sums(slopes)
        if level == "geometric":
            of_sequences = of_sequences / sequences.lengths(dtype)
        spread = of_sequences[sequences.index]
        slopes = torch.where(sequences.kept, spread, 0).view(log_probs.shape)
    for weight, other in ((weights.kl, batch.ref_log_probs), (weights.old_kl, old)):
        if weight is not None and other is not None:
            slope = estimate_slope(log_probs, other.to(dtype), surrogate.estimator)
            slopes = slopes + weighed(weight, slope)
    return slopes
