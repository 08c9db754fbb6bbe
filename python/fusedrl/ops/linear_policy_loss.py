"""Policy losses in plain torch, on top of the fused log-probs of a linear head."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fusedrl.ops import _dispatch, _nested, _rows
from fusedrl.ops.importance_weights import LEVELS
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_kl import token_kl
from fusedrl.ops.token_log_probs.reference import rows_of_tokens

__all__ = ["RECIPES", "PolicyLoss", "PolicyRecipe", "RatioStatistics", "linear_policy_loss"]

TERMS = ("clip", "cispo", "reinforce")
AGGREGATIONS = ("token", "sequence", "constant")


class PolicyRecipe(NamedTuple):
    r"""The ingredients of a policy loss; ``RECIPES`` has the named ones.

    Args:
        term: the loss of a token with ratio r and advantage A. ``"clip"``:
            :math:`-\min(r A, clamp(r, 1 - low, 1 + high) A)`; ``"cispo"``:
            :math:`-clamp(r, 1 - low, 1 + high) A \log p` with a constant r; ``"reinforce"``:
            :math:`-A \log p`.
        ratio: one per ``"token"``, one per ``"sequence"`` (the product over its kept tokens), or
            their ``"geometric"`` mean.
        aggregation: ``"token"``, the mean over kept tokens; ``"sequence"``, the mean over sequences
            of the mean over their kept tokens, 0 where there is none; ``"constant"``, the sum over
            ``normalizer``. KL and entropy are aggregated in the same way.
        low: distance of the lower bound from 1.
        high: distance of the upper bound from 1.
        dual_clip: upper bound of a clipped ratio if the advantage is negative.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``, as in :func:`token_kl`.
    """

    term: str
    ratio: str
    aggregation: str
    low: float
    high: float
    dual_clip: float = math.inf
    kl_estimator: str = "k3"


RECIPES = {
    "grpo": PolicyRecipe("clip", "token", "sequence", 0.2, 0.2),
    "dapo": PolicyRecipe("clip", "token", "token", 0.2, 0.28),
    "dr_grpo": PolicyRecipe("clip", "token", "constant", 0.2, 0.2),
    "gspo": PolicyRecipe("clip", "geometric", "sequence", 3e-4, 4e-4),
    "rloo": PolicyRecipe("clip", "sequence", "sequence", 0.2, 0.2),
    "cispo": PolicyRecipe("cispo", "token", "token", 1.0, 4.0),
    "reinforce": PolicyRecipe("reinforce", "token", "token", 1.0, math.inf),
}


class RatioStatistics(NamedTuple):
    """Statistics of the ratios of kept tokens: 0-dim tensors, without gradient.

    Args:
        mean: mean ratio.
        smallest: smallest ratio.
        largest: largest ratio.
        clipped_low: fraction of the tokens with a negative advantage and a ratio below the lower
            bound, where a clipped loss has no gradient.
        clipped_high: the same for positive advantages and the upper bound.
        effective_sample_size: ``(sum r)^2 / sum r^2``, as a fraction of the number of tokens.
        kl: mean of ``old_log_probs - log_probs``, an estimate of KL(old || new).
    """

    mean: Tensor
    smallest: Tensor
    largest: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    effective_sample_size: Tensor
    kl: Tensor


class PolicyLoss(NamedTuple):
    """A policy loss and its components; only ``loss`` has a gradient.

    Args:
        loss: ``objective + kl_coeff * kl - entropy_coeff * entropy``.
        objective: the aggregated term of the advantages.
        kl: the aggregated KL to the reference policy, ``None`` without one.
        entropy: the aggregated entropy, ``None`` without ``entropy_coeff``.
        log_probs: float32, shaped like the tokens; 0 for a dropped one.
        entropies: the entropy of each token's distribution, ``None`` without ``entropy_coeff``.
        ratio: statistics of the ratios of kept tokens.
    """

    loss: Tensor
    objective: Tensor
    kl: Tensor | None
    entropy: Tensor | None
    log_probs: Tensor
    entropies: Tensor | None
    ratio: RatioStatistics


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    advantages: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    token_advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    token_weights: Tensor | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    loss: str | PolicyRecipe = "grpo",
    normalizer: float | Tensor | None = None,
    kl_coeff: float | None = None,
    entropy_coeff: float | None = None,
    **head: Any,
) -> PolicyLoss:
    r"""Loss of a policy over generated tokens, from the hidden states.

    It is computed in plain torch from the log-probs of :func:`linear_token_log_probs`, which
    describes memory and speed. The ratio of a token is :math:`e^{\log p - \log p_{old}}`.

    Args:
        hidden: ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``.
        weight: ``[V, H]`` of the dtype of ``hidden``.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged, like every other tensor
            with one entry per token. Only ``hidden``, ``weight`` and ``bias`` get gradients.
        advantages: one per sequence, ``[B]``.
        mask: bool; ``None`` keeps all. No value of a dropped token is read.
        token_advantages: one per token, instead of ``advantages``.
        old_log_probs: log-probs of the policy that generated the tokens. ``None`` uses those of
            the current policy, so that every ratio is 1.
        ref_log_probs: log-probs of the reference policy, for ``kl_coeff``.
        token_weights: factor of each token's objective, such as :func:`importance_weights`.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends. Without
            offsets a packed batch is one sequence.
        shift: token *i* reads row *i - 1* of its sequence, and the first token of every sequence
            reads none. Packed hidden states then need ``offsets``.
        loss: ``"grpo"``, ``"dapo"``, ``"dr_grpo"``, ``"gspo"``, ``"rloo"``, ``"cispo"``,
            ``"reinforce"``, or a :class:`PolicyRecipe`: ``RECIPES["grpo"]._replace(high=0.28)``.
        normalizer: divisor instead of the number of tokens (``"token"``) or sequences
            (``"sequence"``), to include other ranks or micro-batches: a number or 1-element tensor.
        kl_coeff: factor of the KL to the reference policy in the loss. 0 only reports the KL.
        entropy_coeff: factor of the entropy bonus in the loss. 0 only reports the entropy.
        head: options of :func:`linear_token_log_probs`, such as ``bias`` and ``temperature``.

    Returns:
        :class:`PolicyLoss`.

    Raises:
        ValueError: an argument that does not fit the others, or an unknown loss.
        RuntimeError: a kept token outside ``[0, V)``; a second derivative.

    Example:
        >>> import torch
        >>> from fusedrl import linear_policy_loss
        >>> hidden, weight, tokens = torch.ones(2, 4), torch.zeros(10, 4), torch.tensor([1, 7])
        >>> log_probs = torch.full((2,), 0.1).log()
        >>> result = linear_policy_loss(
        ...     hidden, weight, tokens, torch.tensor([2.0]), old_log_probs=log_probs - 1
        ... )
        >>> result.objective, result.ratio.clipped_high
        (tensor(-2.4000), tensor(1.))
    """
    recipe = _recipe(loss)
    if (advantages is None) == (token_advantages is None):
        raise ValueError(
            "advantages: expected either advantages or token_advantages, got "
            f"{'neither' if advantages is None else 'both'}; pass one of the two"
        )
    for name, coeff in (("kl_coeff", kl_coeff), ("entropy_coeff", entropy_coeff)):
        number = 0.0 if coeff is None else _dispatch.real_number(coeff)
        if number is None or not abs(number) <= _dispatch.LARGEST:
            raise ValueError(f"{name}: expected a number, got {coeff}; pass 0.0 to only report it")
    if (ref_log_probs is None) != (kl_coeff is None):
        raise ValueError(
            "ref_log_probs: expected a tensor with a kl_coeff, and None without one, got "
            f"{_dispatch.kind(ref_log_probs)} with kl_coeff={kl_coeff}; pass both or neither"
        )
    if recipe.aggregation == "constant" and normalizer is None:
        raise ValueError(
            "normalizer: expected a number with the aggregation 'constant', got None; pass for "
            "example the number of sequences times the maximum completion length"
        )
    packed = _nested.pack("hidden", hidden, offsets, like=tokens)
    tokens, mask = packed.companion("tokens", tokens), packed.optional("mask", mask)
    scored = linear_token_log_probs(
        *(packed.values, weight, tokens, mask),
        offsets=packed.offsets,
        shift=shift,
        entropy=entropy_coeff is not None,
        **head,
    )
    log_probs = scored.log_probs.flatten()
    _, kept = rows_of_tokens(tokens, packed.offsets, shift)
    kept = kept if mask is None else kept & mask.flatten()
    index, count = _rows.sequence_of_tokens(tokens, packed.offsets)

    def column(name: str, value: Tensor) -> Tensor:
        # Dropped tokens become 0: a NaN would reach sums and gradients even if multiplied by 0.
        value = packed.companion(name, value)
        _dispatch.check_tensor(name, value)
        _dispatch.check_same(name, value, tokens.shape, tokens.device, " like tokens")
        return torch.where(kept, value.detach().flatten().to(log_probs.dtype), 0)

    def sums(values: Tensor) -> Tensor:
        # The sum over a token's sequence, for each token.
        return values.new_zeros(count).index_add(0, index, values)[index]

    if token_advantages is not None:
        advantages = column("token_advantages", token_advantages)
    else:
        assert advantages is not None
        _dispatch.check_tensor("advantages", advantages)
        shape, remedy = torch.Size([count]), "pass offsets of packed sequences, or token_advantages"
        _dispatch.check_same("advantages", advantages, shape, tokens.device, remedy=remedy)
        advantages = torch.where(kept, advantages.detach().to(log_probs.dtype)[index], 0)
    old = log_probs.detach() if old_log_probs is None else column("old_log_probs", old_log_probs)
    share = kept.to(log_probs.dtype)
    lengths, parts = sums(share).clamp(min=1), share.sum().clamp(min=1)
    log_ratio = log_probs - old if recipe.ratio == "token" else sums(log_probs - old)
    log_ratio = log_ratio / lengths if recipe.ratio == "geometric" else log_ratio
    if recipe.aggregation == "sequence":
        share, parts = share / lengths, max(count, 1)
    if normalizer is not None:
        if isinstance(normalizer, Tensor) and not normalizer.is_floating_point():
            normalizer = normalizer.double()  # a count
        remedy, low = "pass how many tokens or sequences there are", 1 / _dispatch.LARGEST
        parts = _dispatch.scalar_tensor("normalizer", normalizer, tokens.device, low, remedy=remedy)
    share = share / parts
    factors = share if token_weights is None else share * column("token_weights", token_weights)
    counting = (torch.where(factors != 0, x, 0) for x in (log_probs, log_ratio, advantages))
    objective = (factors * _term(recipe, *counting)).sum()
    total, kl, entropy = objective.clone(), None, None
    # A term with factor 0 is left out, as it may be infinite.
    if ref_log_probs is not None:
        impl = "reference" if head.get("impl") == "reference" else "auto"
        ref, estimator = column("ref_log_probs", ref_log_probs), recipe.kl_estimator
        kl = (share * token_kl(log_probs, ref, kept, estimator=estimator, impl=impl).kl).sum()
        total = total + kl_coeff * kl if kl_coeff else total
    if scored.entropy is not None:
        entropy = (share * scored.entropy.flatten()).sum()
        total = total - entropy_coeff * entropy if entropy_coeff else total
    statistics = _statistics(old - log_probs, log_ratio, advantages, kept, recipe)
    terms = (None if x is None else x.detach() for x in (objective, kl, entropy))
    of_tokens = (None if x is None else packed.result(x.detach()) for x in scored)
    return PolicyLoss._make((total, *terms, *of_tokens, statistics))


def _recipe(loss: str | PolicyRecipe) -> PolicyRecipe:
    if not isinstance(loss, PolicyRecipe):
        loss = RECIPES[_dispatch.check_choice("loss", loss, RECIPES)]
    for name, choices in (("term", TERMS), ("ratio", LEVELS), ("aggregation", AGGREGATIONS)):
        remedy = "change a row of RECIPES with _replace()"
        _dispatch.check_choice(f"loss.{name}", getattr(loss, name), choices, remedy)
    return loss


def _term(recipe: PolicyRecipe, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """The loss of each token. Log-ratios are clamped, as an infinite ratio has a NaN gradient."""
    bounds = 1 - recipe.low, 1 + recipe.high, recipe.dual_clip
    low, high, most = (math.log(x) if x > 0 else -math.inf for x in bounds)
    if recipe.term == "reinforce":
        return -advantages * log_probs
    if recipe.term == "cispo":
        return -log_ratio.detach().clamp(low, high).exp() * advantages * log_probs
    # The minimum bounds the ratio only on the side that its advantage favours.
    bounded = torch.where(advantages < 0, log_ratio.clamp(low, most), log_ratio.clamp(max=high))
    bounded = torch.where(log_ratio.isnan(), log_ratio, bounded)  # clamp drops the gradient of NaN
    return -bounded.exp() * advantages


@torch.no_grad()
def _statistics(
    difference: Tensor, log_ratio: Tensor, advantages: Tensor, kept: Tensor, recipe: PolicyRecipe
) -> RatioStatistics:
    """Statistics at the level of the loss; all 0 where no token is kept."""
    count = kept.sum().to(log_ratio.dtype)
    among = count.clamp(min=1)
    ratio = torch.where(kept, log_ratio.exp(), 0)
    largest = functional.pad(ratio, (0, 1)).amax()
    smallest = functional.pad(torch.where(kept, ratio, torch.inf), (0, 1), value=torch.inf).amin()
    low = (ratio < 1 - recipe.low) & (advantages < 0)
    high = (ratio > 1 + recipe.high) & (advantages > 0)
    # Relative to the largest ratio, so that no square overflows.
    scaled = ratio / largest.clamp(min=torch.finfo(ratio.dtype).tiny)
    squares = scaled.square().sum()
    return RatioStatistics(
        mean=ratio.sum() / among,
        smallest=torch.where(count > 0, smallest, 0),
        largest=largest,
        clipped_low=low.sum() / among,
        clipped_high=high.sum() / among,
        effective_sample_size=torch.where(squares > 0, scaled.sum() ** 2 / squares / among, 0),
        kl=difference.sum() / among,
    )
