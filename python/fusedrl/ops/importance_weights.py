"""Importance weights that correct for tokens sampled from another policy than the trained one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _nested, _rows

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")


class Mismatch(NamedTuple):
    """Divergence of the two policies in each sequence, over kept tokens with a known log-ratio d.

    All fields are ``[B]``. ``tokens`` and ``clipped_tokens`` (ratio outside the bounds) are int64.
    ``k1_sum`` is the sum of ``-d``, ``k3_sum`` that of ``exp(d) - 1 - d``. Fields of two batches
    can be added, except ``max_ratio``, the largest ratio before clipping.
    """

    tokens: Tensor
    clipped_tokens: Tensor
    k1_sum: Tensor
    k3_sum: Tensor
    weight_sum: Tensor
    squared_weight_sum: Tensor
    max_ratio: Tensor

    @property
    def k1(self) -> Tensor:
        """Mean k1 per token in nats: an unbiased estimate of KL(rollout || policy), of any sign."""
        return self.k1_sum / self.tokens.clamp(min=1)

    @property
    def k3(self) -> Tensor:
        """Mean k3 per token in nats: an unbiased estimate of KL(rollout || policy), >= 0."""
        return self.k3_sum / self.tokens.clamp(min=1)

    @property
    def ess(self) -> Tensor:
        """Effective sample size in tokens, ``weight_sum**2 / squared_weight_sum``."""
        tiny = torch.finfo(self.weight_sum.dtype).tiny
        return self.weight_sum.square() / self.squared_weight_sum.clamp(min=tiny)

    @property
    def clipped(self) -> Tensor:
        """Fraction of the tokens whose ratio lies outside the bounds."""
        return self.clipped_tokens / self.tokens.clamp(min=1)

    def total(self) -> Mismatch:
        """The mismatch over all sequences, as 0-dim tensors."""
        sums = Mismatch._make(field.sum() for field in self)
        return sums._replace(max_ratio=self.max_ratio.amax()) if len(self.tokens) else sums


class ImportanceWeights(NamedTuple):
    """Weights in the form of the log-probs, and the mismatch of each sequence."""

    weights: Tensor
    mismatch: Mismatch


def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    level: str = "token",
    mode: str = "truncate",
    low: float | Tensor | None = None,
    high: float | Tensor | None = 2.0,
    nan: str = "propagate",
) -> ImportanceWeights:
    """Weights ``exp(min(d, 20))``, ``d = log_probs - rollout_log_probs``, without a gradient.

    Args:
        log_probs: under the trained policy: padded ``[B, T]``, packed ``[N]``, or nested.
        rollout_log_probs: under the policy that generated the tokens, in the same form.
        mask: bool in the same form; a dropped token has weight 0 and is not read.
        offsets: int64 ``[B + 1]``, where sequences of packed values start and end. Required for
            packed values if the ratio is one per sequence.
        level: ``"token"``: one ratio per token; ``"sequence"`` or ``"geometric"``: one ratio per
            sequence, from the sum or the mean of d over its tokens.
        mode: ratios outside ``[low, high]`` become the bound (``"truncate"``) or 0 (``"mask"``).
        low: lower bound, a number or 0-dim tensor from 0 to 1e30; ``None`` for none.
        high: upper bound, in the same way.
        nan: ``"propagate"`` a NaN, or treat its token as ``"missing"``, with d = 0.

    Returns:
        Weights in float32 (float64 for float64), and the :class:`Mismatch` of each sequence.

    Example:
        >>> import torch
        >>> from fusedrl import importance_weights
        >>> policy, rollout = torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -1.0]])
        >>> weights, mismatch = importance_weights(policy, rollout)
        >>> weights, mismatch.clipped
        (tensor([[2.0000, 0.1353]]), tensor([0.5000]))
    """
    _dispatch.check_choice("level", level, LEVELS)
    _dispatch.check_choice("mode", mode, MODES)
    _dispatch.check_choice("nan", nan, _dispatch.NANS)
    batch = _nested.pack("log_probs", log_probs, offsets, form="[B, j]")
    p, offsets = batch.values, batch.offsets
    q, mask = batch.companion("rollout_log_probs", rollout_log_probs), batch.optional("mask", mask)
    _dispatch.check_same("rollout_log_probs", q, p.shape, p.device, " like log_probs")
    _dispatch.check_mask(mask, p.shape, p.device, " like log_probs")
    _dispatch.check_offsets(offsets, p.numel(), p.device)
    if p.dim() == 1 and offsets is None and level != "token":
        raise ValueError(
            f"offsets: expected the boundaries of packed sequences with level={level!r}, got None; "
            "pass offsets=torch.tensor([0, N]) if all tokens are one sequence"
        )
    # No ratio is outside [0, 1e30], so these stand for no bound.
    no_bound = _dispatch.LARGEST
    least = _dispatch.scalar_tensor("low", 0.0 if low is None else low, p.device, 0.0)
    most = _dispatch.scalar_tensor("high", no_bound if high is None else high, p.device, 0.0)
    if all(x.is_cpu and _dispatch.has_values(x) for x in (least, most)) and least > most:
        raise ValueError(f"low: expected at most high={high}, got {low}; swap the bounds")
    dtype = torch.promote_types(torch.promote_types(p.dtype, q.dtype), torch.float32)
    sequences, count = _rows.sequence_of_tokens(p, offsets)
    log_ratio = (p.detach().to(dtype) - q.detach().to(dtype)).flatten()
    kept = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask.flatten()
    known = kept & ~log_ratio.isnan() if nan == "missing" else kept
    d = log_ratio.masked_fill(~known, 0)

    def total(values: Tensor) -> Tensor:
        # index_add adds term by term, which loses digits in float32 over a long sequence.
        wide = values.double()
        return wide.new_zeros(count).index_add(0, sequences, wide).to(values.dtype)

    tokens, of_sequence, of_level = total(known.long()), total(d), d
    if level != "token":
        among = tokens.clamp(min=1) if level == "geometric" else 1
        of_level = (of_sequence / among)[sequences]
    ratio = of_level.clamp(max=20.0).exp()
    least, most = least.to(ratio), most.to(ratio)
    outside = (ratio < least) | (ratio > most)
    weights = ratio.masked_fill(outside, 0) if mode == "mask" else ratio.clamp(least, most)
    # expm1(d) - d is NaN where d is inf; the limit is inf.
    k3 = torch.where(d == torch.inf, d, torch.expm1(d) - d)
    counted = weights.masked_fill(~known, 0)
    clipped, squares = (outside & known).long(), counted.square()
    sums = total(clipped), -of_sequence, total(k3), total(counted), total(squares)
    largest = ratio.new_zeros(count).scatter_reduce(0, sequences, ratio * known, "amax")
    weights = weights.masked_fill(~kept, 0).view(p.shape)
    return ImportanceWeights(batch.result(weights), Mismatch(tokens, *sums, largest))
