"""The definition of ``importance_weights`` in plain torch: what kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None,
    sequences: Tensor,
    count: int,
    low: Tensor,
    high: Tensor,
    level: str,
    mode: str,
    nan_missing: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of packed tokens; token ``i`` belongs to sequence ``sequences[i]`` of ``count``.

    Returns:
        The weights ``[N]``, and for each sequence the numbers of its known and of its clipped
        tokens (``[count, 2]``), and its sums of k1, k3, weights and squared weights, and its
        largest ratio (``[count, 5]``). In float32, or in float64 for float64 inputs.
    """
    dtype = torch.float64 if log_probs.dtype == torch.float64 else torch.float32
    kept = torch.ones_like(sequences, dtype=torch.bool) if mask is None else mask
    log_ratio = log_probs.to(dtype) - rollout_log_probs.to(dtype)
    known = kept & ~log_ratio.isnan() if nan_missing else kept
    # Replaced before the formula: a NaN dropped here must not reach a sum.
    d = log_ratio.masked_fill(~known, 0)

    def total(values: Tensor) -> Tensor:
        return values.new_zeros(count).index_add(0, sequences, values)

    tokens = total(known.to(torch.int64))
    of_level = d
    if level != "token":
        of_sequence = total(d)
        if level == "geometric":
            of_sequence = of_sequence / tokens.clamp(min=1)
        of_level = of_sequence[sequences]
    ratio = of_level.clamp(max=MAX_LOG_RATIO).exp()
    outside = (ratio < low.to(ratio)) | (ratio > high.to(ratio))
    inside = ratio.maximum(low.to(ratio)).minimum(high.to(ratio))
    weights = ratio.masked_fill(outside, 0) if mode == "mask" else inside
    of_known = weights.masked_fill(~known, 0)
    ratio_of_known = ratio.masked_fill(~known, 0)
    largest = ratio.new_zeros(count).scatter_reduce(0, sequences, ratio_of_known, "amax")
    # expm1(d) - d is no number where d is infinite; the limit is.
    k3 = torch.where(d == torch.inf, d, torch.expm1(d) - d)
    sums = [total(0 - d), total(k3), total(of_known), total(of_known.square()), largest]
    counts = [tokens, total((known & outside).to(torch.int64))]
    return weights.masked_fill(~kept, 0), torch.stack(counts, 1), torch.stack(sums, 1)
