"""The loss of a policy from its hidden states, with its gradients, in one pass over row blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _head, _nested, _rows
from fusedrl.ops.linear_policy_loss import autograd, losses
from fusedrl.ops.linear_policy_loss.autograd import Task
from fusedrl.ops.linear_policy_loss.statistics import RatioStatistics, ratio_statistics
from fusedrl.ops.linear_policy_loss.two_pass import (
    corrected,
    from_log_probs,
    from_sequence_ratios,
)
from fusedrl.ops.linear_token_log_probs.arguments import check_shard
from fusedrl.ops.token_kl.reference import estimate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PolicyLoss", "RatioStatistics", "linear_policy_loss"]

_COUNTS = (torch.int64, torch.int32)  # of tokens or sequences, as sums over masks and ranks are
IMPORTANCE_OPTIONS = ("level", "mode", "low", "high", "nan")


class PolicyLoss(NamedTuple):
    """A policy's loss, and what it is made of.

    Args:
        loss: ``objective + kl_coeff * kl - entropy_coeff * entropy``, which differentiates.
        objective: the aggregated term of the advantages. Like all that follows it has no gradient.
        kl: the aggregated KL to the reference policy, ``None`` without one.
        entropy: the aggregated entropy, ``None`` where it was not asked for.
        log_probs: float32, shaped like the tokens; 0 for a dropped one.
        entropies: the entropy of each token's distribution, ``None`` where it was not asked for.
        ratio: statistics of the ratios of kept tokens: ``mean``, ``smallest``, ``largest``,
            ``clipped_low``, ``clipped_high``, ``effective_sample_size`` and ``kl``.

    Example:
        >>> import torch
        >>> from fusedrl import linear_policy_loss
        >>> hidden, weight, tokens = torch.ones(2, 4), torch.zeros(10, 4), torch.tensor([1, 7])
        >>> log_probs = torch.full((2,), 0.1).log()
        >>> result = linear_policy_loss(
        ...     hidden, weight, tokens, torch.tensor([2.0, 1.0]), old_log_probs=log_probs - 1
        ... )
        >>> result.objective, result.ratio.clipped_high
        (tensor(-1.8000), tensor(1.))
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
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    old_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    token_weights: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    importance: Mapping[str, Any] | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    loss: str = "grpo",
    ratio: str | None = None,
    clip: float | Sequence[float] | None = None,
    dual_clip: float | None = None,
    aggregation: str | None = None,
    normalizer: float | Tensor | None = None,
    kl_coeff: float = 0.0,
    kl_estimator: str = "k3",
    entropy_coeff: float = 0.0,
    entropy: bool = False,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    temperature: float | Tensor = 1.0,
    vocab_offset: int | None = None,
    vocab_group: ProcessGroup | None = None,
    impl: str = "auto",
) -> PolicyLoss:
    r"""Loss of a policy over generated tokens, and its gradients, from the hidden states.

    Each token has a ratio :math:`r = e^{\log p - \log p_{old}}` and an advantage :math:`A`. Its
    term of a clipped loss is :math:`-\min(r A, clamp(r, 1 - low, 1 + high) A)`.

    ============= ================================= =========== =========== ============
    ``loss``      term of a token                   ``ratio``   aggregation ``clip``
    ============= ================================= =========== =========== ============
    ``grpo``      clipped                           token       sequence    0.2
    ``dapo``      clipped                           token       token       (0.2, 0.28)
    ``dr_grpo``   clipped                           token       constant    0.2
    ``gspo``      clipped                           geometric   sequence    (3e-4, 4e-4)
    ``rloo``      clipped                           sequence    sequence    0.2
    ``cispo``     ``-clamp(r) A log p``, r constant token       token       (1, 4)
    ``reinforce`` ``-A log p``                      token       token       none
    ============= ================================= =========== =========== ============

    A block of rows is multiplied by the head once, reduced to log-probs, weighed, overwritten by
    the gradient of its logits, and multiplied into both gradients before the next block starts.
    That is three matrix products, where a log-prob op and a loss behind it take four. The logits of
    one block exist at a time: at most 256 MiB, or one row. On CUDA their gradients wait for those
    of more blocks, up to the memory of the weight's gradient in float32. A ratio of whole sequences
    takes four products, as it needs their log-probs first, and so does a vocabulary that is sharded
    over ranks. Only kept rows are multiplied. Where gradients are needed, the forward pass makes
    them and sums them in float32, and the backward pass scales and rounds them. That of a bfloat16
    weight is kept rounded, and rounded once more where it is scaled by no power of two.

    In bfloat16 on a CPU with AVX512-BF16, ``torch.set_float32_matmul_precision("medium")`` rounds
    the gradients of logits to bfloat16 before they are multiplied, which is faster.

    Args:
        hidden: ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``; float32, bfloat16
            or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``. ``torch.autocast`` rounds both to its dtype.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged, as is every other tensor
            of one entry a token.
        advantages: one for each token, shaped like ``tokens``, or one for each sequence, ``[B]`` or
            ``[B, 1]``. Where there are as many packed tokens as sequences, one dimension may mean
            either: pass ``[B, 1]``, or ``[1, N]`` for those of tokens.
        mask: bool, shaped like ``tokens``; ``None`` keeps all. Nothing of a dropped token is read.
        old_log_probs: log-probs of the policy that generated, shaped like ``tokens``. With ``None``
            those of the policy itself are taken, so that every ratio is 1.
        ref_log_probs: log-probs of the reference policy, which ``kl_coeff`` needs. Where that is 0
            they have no part in the loss, and ``kl`` is computed all the same.
        token_weights: factor of each token's objective, a constant shaped like ``tokens``.
        rollout_log_probs: log-probs of the engine that generated, where those differ from what the
            same weights give in training. Each token's objective is multiplied by the
            :func:`importance_weights` of ``old_log_probs`` to them, beside ``token_weights``.
            Without ``old_log_probs`` the policy's own are computed first: four products.
        importance: options of :func:`importance_weights`, such as ``{"level": "geometric"}``; not
            its tensors.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends. Without
            offsets a packed batch is one sequence.
        shift: token *i* reads row *i - 1* of its own sequence, and the first token of every
            sequence has no row. Packed hidden states then need ``offsets``. Without it token *i*
            reads row *i*.
        loss: a row of the table, which ``ratio``, ``clip`` and ``aggregation`` change.
        ratio: ``"token"``, ``"sequence"`` (the product over the kept tokens of a sequence) or
            ``"geometric"`` (its geometric mean).
        clip: ``low`` and ``high``, the distances of the bounds from 1, or one number for both: the
            ratio is clamped to ``[1 - low, 1 + high]``. Without effect on ``reinforce``.
        dual_clip: upper bound of the ratio where the advantage is negative; for clipped losses
            alone.
        aggregation: ``"token"``, the mean over kept tokens; ``"sequence"``, the mean over sequences
            of the mean over their kept tokens, 0 where there is none; ``"constant"``, the sum over
            ``normalizer``. KL and entropy are aggregated in the same way.
        normalizer: replaces the number of tokens (``"token"``) or sequences (``"sequence"``), to
            count those of other ranks or micro-batches too: a number, or a tensor of one element.
        kl_coeff: factor of the KL to the reference policy in the loss.
        kl_estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``, as :func:`token_kl` has them.
        entropy_coeff: factor of the entropy, which the loss rewards.
        entropy: also compute entropies where ``entropy_coeff`` is 0.
        bias: ``[V]`` of the dtype of ``weight``.
        softcap: positive bound of the logits, see :func:`linear_token_log_probs`.
        scale: positive factor of the logits.
        temperature: divisor of the logits, from 1e-30 to 1e30. No gradient flows to it.
        vocab_offset: the first class of ``weight``, where that is a shard of a larger vocabulary.
        vocab_group: the process group whose ranks hold the other shards.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        :class:`PolicyLoss`.

    Raises:
        TypeError: a mask that is not bool, hidden states, advantages or log-probs that are not
            floating point, an unknown option in ``importance``.
        ValueError: an unknown loss, shapes, dtypes, devices or offsets that do not fit, a
            coefficient without what it weighs, a constant that requires grad.
        RuntimeError: a kept token outside ``[0, V)``; a second derivative.

    Example:
        >>> import torch
        >>> from fusedrl import linear_policy_loss
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(6, 8), torch.randn(100, 8, requires_grad=True)
        >>> tokens, offsets = torch.randint(0, 100, (6,)), torch.tensor([0, 4, 6])
        >>> advantages = torch.tensor([1.0, -1.0])
        >>> result = linear_policy_loss(
        ...     hidden, weight, tokens, advantages, offsets=offsets, shift=True
        ... )
        >>> result.loss.backward()
        >>> weight.grad.shape
        torch.Size([100, 8])
    """
    _dispatch.check_flags(shift=shift, entropy=entropy)
    packed = _nested.pack("hidden", hidden, offsets, like=tokens)
    hidden, offsets = packed.values, packed.offsets
    tokens, mask = packed.companion("tokens", tokens), packed.optional("mask", mask)
    old_log_probs = packed.optional("old_log_probs", old_log_probs)
    ref_log_probs = packed.optional("ref_log_probs", ref_log_probs)
    token_weights = packed.optional("token_weights", token_weights)
    rollout_log_probs = packed.optional("rollout_log_probs", rollout_log_probs)
    advantages = packed.spread("advantages", advantages)
    surrogate, level, aggregation = losses.recipe_of(
        loss, ratio, aggregation, clip, dual_clip, kl_estimator
    )
    head = _head.prepare("", hidden, weight, bias, scale, softcap)
    _rows.check_rows("hidden", head.hidden, offsets, shift)
    _rows.check_tokens(tokens, "hidden", head.hidden)
    _dispatch.check_mask(mask, tokens.shape, head.hidden.device)
    check_shard(vocab_offset, vocab_group)
    kl_coeff = _coefficient("kl_coeff", kl_coeff)
    entropy_coeff = _coefficient("entropy_coeff", entropy_coeff)
    _check_terms(kl_coeff, ref_log_probs, aggregation, normalizer)
    _check_importance(importance, rollout_log_probs)
    chosen = _dispatch.choose(impl, "linear_policy_loss", head.hidden.device, head.hidden.dtype)
    _dispatch.check_counted_on_host(mask, shift, head.hidden.device)
    rows = autograd.Rows(
        tokens.to(torch.int64).contiguous(),
        None if mask is None else mask.contiguous(),
        None if offsets is None else offsets.to(torch.int64).contiguous(),
        shift,
        _dispatch.temperature_tensor(temperature, head.hidden.device, chosen),
    )
    sequences = losses.sequences_of(tokens, rows.mask, rows.offsets, shift)
    dtype = _dispatch.result_dtype(head.hidden)
    batch = losses.PolicyBatch(
        _advantages(advantages, tokens, sequences, dtype),
        _constant("old_log_probs", old_log_probs, tokens, dtype),
        _constant("ref_log_probs", ref_log_probs, tokens, dtype),
    )
    factors = _constant("token_weights", token_weights, tokens, dtype)
    if normalizer is not None:
        low = 1 / _dispatch.LARGEST
        if isinstance(normalizer, Tensor) and normalizer.dtype in _COUNTS:
            normalizer = normalizer.double()
        normalizer = _dispatch.scalar_tensor(
            *("normalizer", normalizer, head.hidden.device, low),
            remedy="pass how many tokens or sequences there are",
        )
    share = losses.shares(sequences, aggregation, normalizer, dtype).view(tokens.shape)
    weights = losses.TermWeights(
        share if factors is None else torch.where(share > 0, share * factors, 0),
        kl=share * kl_coeff if kl_coeff else None,
        entropy=share * -entropy_coeff if entropy_coeff else None,
    )
    task = Task(head, rows, batch, weights, surrogate, entropy or bool(entropy_coeff))
    rollout = _constant("rollout_log_probs", rollout_log_probs, tokens, dtype)
    if rollout is not None:
        kept = sequences.kept
        task = corrected(
            task, rollout, importance or {}, sequences.offsets, kept, vocab_offset, vocab_group
        )
    if chosen == "reference" or vocab_group is not None:
        terms = from_log_probs(task, level, sequences, chosen, vocab_offset, vocab_group)
    elif level == "token":
        terms = autograd.run(task)
    else:
        terms = from_sequence_ratios(task, level, sequences)
    detached = terms.values.detach()
    log_probs, entropies = terms.log_probs, terms.entropy if task.entropy else None
    kl = (
        None
        if batch.ref_log_probs is None
        else estimate(log_probs, batch.ref_log_probs, kl_estimator)
    )
    return PolicyLoss(
        terms.values.sum(),
        detached[0],
        _aggregated(share, kl),
        _aggregated(share, entropies),
        packed.result(log_probs),
        packed.result(entropies),
        ratio_statistics(log_probs, batch, surrogate, level, sequences),
    )


def _aggregated(share: Tensor, column: Tensor | None) -> Tensor | None:
    if column is None:
        return None
    return torch.where(share > 0, share * column, 0).sum()


def _coefficient(name: str, value: float) -> float:
    number = _dispatch.real_number(value)
    if number is None or not -_dispatch.LARGEST <= number <= _dispatch.LARGEST:
        raise ValueError(
            f"{name}: expected a number from -1e30 to 1e30, got {value!r}; 0.0 leaves the term out"
        )
    return float(number)


def _check_terms(
    kl_coeff: float,
    ref_log_probs: Tensor | None,
    aggregation: str,
    normalizer: float | Tensor | None,
) -> None:
    if kl_coeff and ref_log_probs is None:
        raise ValueError(
            f"ref_log_probs: expected a tensor with kl_coeff={kl_coeff}, got None; pass the "
            "reference policy's log-probs of the tokens, or kl_coeff=0"
        )
    if aggregation == "constant" and normalizer is None:
        raise ValueError(
            "normalizer: expected a number with aggregation='constant', got None; pass the number "
            "of sequences times the longest length that may be generated, for example"
        )


def _check_importance(
    importance: Mapping[str, Any] | None, rollout_log_probs: Tensor | None
) -> None:
    if importance is None:
        return
    if not isinstance(importance, Mapping):
        raise TypeError(
            "importance: expected a mapping of options of importance_weights, got "
            f"{_dispatch.kind(importance)}; pass a dict such as {{'level': 'sequence'}}"
        )
    for name in importance:
        if name not in IMPORTANCE_OPTIONS:
            raise TypeError(
                f"importance: expected options among {', '.join(IMPORTANCE_OPTIONS)}, got "
                f"{name!r}; leave it out"
            )
    if importance and rollout_log_probs is None:
        raise ValueError(
            "rollout_log_probs: expected a tensor with importance, got None; pass the log-probs of "
            "the engine that generated, or leave out importance"
        )


def _constant(name: str, value: Tensor | None, tokens: Tensor, dtype: torch.dtype) -> Tensor | None:
    """A constant for each token, in the form that kernels read."""
    if value is None:
        return None
    _check_constant(name, value)
    _dispatch.check_same(name, value, tokens.shape, tokens.device, " like tokens")
    return value.to(dtype).contiguous()


def _advantages(
    value: Tensor, tokens: Tensor, sequences: losses.Sequences, dtype: torch.dtype
) -> Tensor:
    _check_constant("advantages", value)
    count = sequences.count
    of_sequences = _rows.is_of_sequences(
        "advantages", value, tokens.shape, count, sequences.offsets if tokens.dim() == 1 else None
    )
    if of_sequences is None:
        raise ValueError(
            f"advantages: expected shape {tuple(tokens.shape)}, one for each token, or "
            f"({count},), one for each sequence, got {tuple(value.shape)}; "
            + _reshaped(value, tokens, count)
        )
    _dispatch.check_device("advantages", value, tokens.device)
    spread = value.flatten()[sequences.index] if of_sequences else value
    return spread.reshape(tokens.shape).to(dtype).contiguous()


def _reshaped(advantages: Tensor, tokens: Tensor, sequences: int) -> str:
    """What makes advantages fit, for an error."""
    if advantages.numel() == sequences:
        return "flatten it with .flatten()"
    if advantages.numel() == tokens.numel():
        return f"reshape it with .reshape({', '.join(map(str, tokens.shape))})"
    if tokens.dim() == 1 and sequences == 1 and advantages.dim() == 1:
        return "packed tokens without offsets are one sequence: pass offsets if they are several"
    return "give one value for each token, or one for each sequence"


def _check_constant(name: str, value: Tensor) -> None:
    _dispatch.check_tensor(name, value)
    _dispatch.check_floating(name, value)
    if value.requires_grad:
        raise ValueError(
            f"{name}: expected a constant, got a tensor that requires grad; no gradient flows to "
            f"it: pass {name}.detach()"
        )
