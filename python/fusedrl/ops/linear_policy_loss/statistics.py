"""What the importance ratios of a batch look like."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Sequences, Surrogate, log_ratios


class RatioStatistics(NamedTuple):
    """Statistics of the ratios of kept tokens: 0-dim tensors, without gradient.

    Args:
        mean: their mean.
        smallest: the least of them.
        largest: the greatest of them.
        clipped_low: fraction of the tokens that have a negative advantage and a ratio below the
            lower bound. The objective of a clipped loss has no gradient there.
        clipped_high: fraction of the tokens that have a positive advantage and a ratio above the
            upper bound. The same holds for them.
        effective_sample_size: ``(sum r)^2 / sum r^2`` as a fraction of the number of tokens, in
            (0, 1].
        kl: mean of ``old_log_probs - log_probs``, an estimate of the KL of the policy that
            generated to the policy.
    """

    mean: Tensor
    smallest: Tensor
    largest: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    effective_sample_size: Tensor
    kl: Tensor


@torch.no_grad()
def ratio_statistics(
    log_probs: Tensor, batch: PolicyBatch, surrogate: Surrogate, level: str, sequences: Sequences
) -> RatioStatistics:
    """Statistics at the level of the loss; all 0 where no token is kept."""
    old = log_probs if batch.old_log_probs is None else batch.old_log_probs.to(log_probs)
    difference = log_probs - old
    kept, count = sequences.kept, sequences.kept.sum().to(difference.dtype)
    log_ratio = log_ratios(difference, level, sequences).flatten()
    ratio = torch.where(kept, log_ratio.exp(), 0)
    advantages = batch.advantages.flatten()
    low = kept & (ratio < surrogate.low) & (advantages < 0)
    high = kept & (ratio > surrogate.high) & (advantages > 0)
    among = count.clamp(min=1)
    # Relative to the largest, so that no square overflows.
    largest = ratio.amax() if len(ratio) else ratio.sum()
    scaled = ratio / largest.clamp(min=torch.finfo(ratio.dtype).tiny)
    squares = scaled.square().sum()
    smallest = torch.where(kept, ratio, torch.inf)
    return RatioStatistics(
        mean=ratio.sum() / among,
        smallest=torch.where(count > 0, smallest.amin(), 0) if len(ratio) else largest,
        largest=largest,
        clipped_low=low.sum() / among,
        clipped_high=high.sum() / among,
        effective_sample_size=torch.where(squares > 0, scaled.sum() ** 2 / squares / among, 0),
        kl=torch.where(kept, -difference.flatten(), 0).sum() / among,
    )
