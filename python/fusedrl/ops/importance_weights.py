"""Importance weights of tokens that another policy generated than the one that trains on them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _nested, _rows

__all__ = ["LEVELS", "MODES", "ImportanceWeights", "Mismatch", "importance_weights"]

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "mask")
MAX_LOG_RATIO = 20.0


class Mismatch(NamedTuple):
    """How far the policy that trains is from the one that generated, a value for each sequence.

    All fields but ``max_ratio`` are sums over the kept tokens whose log ratio is known, so that
    fields of two batches can be added. A sequence without such tokens has 0 in every field.

    Args:
        tokens: how many there are, int64 ``[B]``.
        clipped_tokens: how many of their ratios lie outside the bounds, int64 ``[B]``.
        k1_sum: of ``-d`` with the log ratio ``d = log_probs - rollout_log_probs``, float ``[B]``.
        k3_sum: of ``exp(d) - 1 - d``.
        weight_sum: of the weights.
        squared_weight_sum: of their squares.
        max_ratio: the largest ratio, before the bounds.
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
        """Mean k1 of a token in nats: KL(rollout || policy), unbiased, of either sign."""
        return self.k1_sum / self.tokens.clamp(min=1)

    @property
    def k3(self) -> Tensor:
        """Mean k3 of a token in nats: KL(rollout || policy), unbiased, never negative."""
        return self.k3_sum / self.tokens.clamp(min=1)

    @property
    def ess(self) -> Tensor:
        """Effective sample size in tokens, ``weight_sum**2 / squared_weight_sum``."""
        squares = self.squared_weight_sum
        return self.weight_sum.square() / squares.clamp(min=torch.finfo(squares.dtype).tiny)

    @property
    def clipped(self) -> Tensor:
        """Fraction of the tokens whose ratio lies outside the bounds."""
        return self.clipped_tokens / self.tokens.clamp(min=1)

    def total(self) -> Mismatch:
        """The same over all sequences together, as 0-dim tensors."""
        sums = Mismatch._make(field.sum() for field in self)
        largest = self.max_ratio
        return sums._replace(max_ratio=largest.amax()) if largest.numel() else sums


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
    r"""Importance weights of tokens that came from another policy than the one in training.

    Each token has a log ratio ``d = log_probs - rollout_log_probs``, and its ratio is
    :math:`e^{\min(x, 20)}`. At the level ``"token"``, x is d. At the level ``"sequence"``, x is the
    sum of d over the kept tokens of the sequence, and at ``"geometric"`` their mean, so that all
    tokens of a sequence have one ratio. The weight is the ratio, limited as ``mode`` says.

    Weights are constants: no gradient flows through them to the log-probs of either policy. Tokens
    of a policy that is too old are left out by a mask over their versions.

    Args:
        log_probs: float log-probs of the sampled tokens under the policy that trains: padded
            ``[B, T]``, a sequence a row, packed ``[N]`` with offsets, or a nested tensor.
        rollout_log_probs: those under the policy that generated, in the same form.
        mask: bool in the same form; ``None`` keeps all. A dropped token has weight exactly 0, and
            its log-probs are not read.
        offsets: int64 ``[B + 1]``, where each sequence of packed ``[N]`` values starts and ends. At
            the level of tokens they may be left out; all values then are one sequence.
        level: ``"token"``, ``"sequence"`` or ``"geometric"``.
        mode: what becomes of a ratio outside ``[low, high]``: ``"truncate"`` puts the bound in its
            place (TIS), ``"mask"`` puts 0 (MIS, IcePop).
        low: lower bound of the ratio, from 0 to 1e30; ``None`` for no bound. A 0-dim tensor may
            change under ``torch.compile`` without a recompile.
        high: upper bound of the ratio, in the same way.
        nan: ``"propagate"`` a NaN, or take it as ``"missing"``: a token whose log ratio is NaN then
            has ratio 1 at the level of tokens, adds nothing to the ratio of its sequence, and does
            not count in the mismatch.

    Returns:
        :class:`ImportanceWeights`: the weights in the form of ``log_probs``, float32 (float64 for
        float64), and the :class:`Mismatch` of each sequence.

    Raises:
        TypeError: a mask that is not bool, values that are not floating point, arguments of
            different forms, a sparse tensor, a bound that is no real number.
        ValueError: an unknown option, shapes, devices and offsets that do not fit, packed values
            without offsets where a sequence has one ratio, or bounds out of range or order. Bounds
            are not checked in a compiled graph, nor where they are tensors on the GPU.

    Example:
        >>> import torch
        >>> from fusedrl import importance_weights
        >>> policy = torch.tensor([[-1.0, -0.5, -2.0], [-1.0, -3.0, -1.0]])
        >>> rollout = torch.tensor([[-1.1, -0.5, -3.0], [-1.0, -1.0, -1.0]])
        >>> weights, mismatch = importance_weights(policy, rollout)
        >>> weights
        tensor([[1.1052, 1.0000, 2.0000],
                [1.0000, 0.1353, 1.0000]])
        >>> mismatch.max_ratio
        tensor([2.7183, 1.0000])
        >>> total = mismatch.total()
        >>> f"{total.k3:.3f} nats, {total.ess:.2f} of {total.tokens} tokens"
        '0.310 nats, 4.73 of 6 tokens'
        >>> importance_weights(policy, rollout, level="sequence", mode="mask", high=2.5).weights
        tensor([[0.0000, 0.0000, 0.0000],
                [0.1353, 0.1353, 0.1353]])
    """
    for name, value, choices in (
        ("level", level, LEVELS),
        ("mode", mode, MODES),
        ("nan", nan, _dispatch.NANS),
    ):
        _dispatch.check_choice(name, value, choices)
    batch = _nested.pack("log_probs", log_probs, offsets, form="[B, j]")
    log_probs, offsets = batch.values, batch.offsets
    rollout_log_probs = batch.companion("rollout_log_probs", rollout_log_probs)
    mask = batch.optional("mask", mask)
    _check(log_probs, rollout_log_probs, mask, offsets, level)
    least, most = _bounds(low, high, log_probs.device)
    dtype = torch.promote_types(log_probs.dtype, rollout_log_probs.dtype)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    sequences, count = _rows.sequence_of_tokens(log_probs, offsets)
    log_ratio = log_probs.detach().to(dtype) - rollout_log_probs.detach().to(dtype)
    kept = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    known = kept & ~log_ratio.isnan() if nan == "missing" else kept
    # Replaced before the formula: a NaN dropped here must not reach a sum.
    d = log_ratio.masked_fill(~known, 0).flatten()
    kept, known = kept.flatten(), known.flatten()

    def total(values: Tensor) -> Tensor:
        # In float64: a float32 sum over a long sequence, term by term, loses digits.
        wide = values.double()
        return wide.new_zeros(count).index_add(0, sequences, wide).to(values.dtype)

    tokens = total(known.to(torch.int64))
    of_level = d
    if level != "token":
        of_sequence = total(d)
        if level == "geometric":
            of_sequence = of_sequence / tokens.clamp(min=1)
        of_level = of_sequence[sequences]
    ratio = of_level.clamp(max=MAX_LOG_RATIO).exp()
    least, most = least.to(ratio), most.to(ratio)
    outside = (ratio < least) | (ratio > most)
    if mode == "mask":
        weights = ratio.masked_fill(outside, 0)
    else:
        weights = ratio.maximum(least).minimum(most)
    of_known = weights.masked_fill(~known, 0)
    ratio_of_known = ratio.masked_fill(~known, 0)
    mismatch = Mismatch(
        tokens,
        total((known & outside).to(torch.int64)),
        total(0 - d),
        # expm1(d) - d is no number where d is infinite; the limit is.
        total(torch.where(d == torch.inf, d, torch.expm1(d) - d)),
        total(of_known),
        total(of_known.square()),
        ratio.new_zeros(count).scatter_reduce(0, sequences, ratio_of_known, "amax"),
    )
    weights = weights.masked_fill(~kept, 0).view(log_probs.shape)
    return ImportanceWeights(batch.result(weights), mismatch)


def _check(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    level: str,
) -> None:
    _dispatch.check_tensor("rollout_log_probs", rollout_log_probs, like=" like log_probs")
    for name, value in (("log_probs", log_probs), ("rollout_log_probs", rollout_log_probs)):
        _dispatch.check_floating(name, value)
    if log_probs.dim() not in (1, 2):
        raise ValueError(
            f"log_probs: expected [N] packed or [B, T] padded, got shape "
            f"{tuple(log_probs.shape)}; give each sequence a row, or flatten all and pass offsets"
        )
    shape, device, like = log_probs.shape, log_probs.device, " like log_probs"
    _dispatch.check_same("rollout_log_probs", rollout_log_probs, shape, device, like)
    _dispatch.check_mask(mask, shape, device, like)
    if log_probs.dim() == 2 and offsets is not None:
        raise ValueError(
            "offsets: expected None with padded [B, T] log_probs (one sequence a row), "
            "got a tensor; flatten the log-probs if it is of packed values"
        )
    if log_probs.dim() == 1 and offsets is None and level != "token":
        raise ValueError(
            f"offsets: expected the sequence boundaries of packed [N] log_probs with "
            f"level={level!r}, got None; pass offsets=torch.tensor([0, N]) if all tokens are one "
            "sequence"
        )
    _dispatch.check_offsets(offsets, log_probs.numel(), log_probs.device)


def _bounds(low: Any, high: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Both bounds as 0-dim float64 tensors: 0 or infinity, which no ratio passes, for ``None``."""

    def bound(name: str, value: float | Tensor | None, none: float) -> Tensor:
        if value is None:
            return torch.full((), none, dtype=torch.float64, device="cpu")
        return _dispatch.scalar_tensor(
            *(name, value, device, 0.0, _dispatch.LARGEST), remedy="None sets no bound"
        )

    least, most = bound("low", low, 0.0), bound("high", high, torch.inf)
    known = all(x.is_cpu and _dispatch.has_values(x) for x in (least, most))
    if known and least.item() > most.item():
        raise ValueError(
            f"low: expected at most high={most.item():g}, got {least.item():g}; swap the bounds"
        )
    return least, most
