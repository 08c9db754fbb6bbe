"""Divergence of the policy from its reference over the whole vocabulary, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _nested, _rows
from fusedrl.ops.exact_kl import reference

__all__ = ["DIRECTIONS", "ExactKL", "exact_kl"]

DIRECTIONS = ("reverse", "forward", "jensen_shannon")


class ExactKL(NamedTuple):
    """Divergences and entropies of the policy for each token, in nats and float32.

    Both are shaped like the tokens; ``kl`` is the divergence in the direction of the call, and
    ``entropy`` is ``None`` where it was not asked for.
    """

    kl: Tensor
    entropy: Tensor | None


class Divergence(NamedTuple):
    """What an op computes: ``beta`` is 1 for KL(p || q), and less for a mixture of p and q.

    The policy is p, unless ``swapped``: then it is q.
    """

    beta: float
    swapped: bool


def exact_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    entropy: bool = False,
    classes: int | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
) -> ExactKL:
    r"""Divergence between the policy's and the reference's distribution of each token.

    With the policy :math:`p = \mathrm{softmax}(\text{logits} / \text{temperature})`, the reference
    :math:`q` likewise and :math:`m = (1 - \beta) p + \beta q`, in nats:
    ``"reverse"`` :math:`KL(p \| q) = \sum_v p_v (\log p_v - \log q_v)`,
    ``"forward"`` :math:`KL(q \| p)`,
    ``"jensen_shannon"`` :math:`(1 - \beta) KL(p \| m) + \beta KL(q \| m)`, with
    :math:`\beta = 1/2` at most :math:`\log 2`.
    This is the generalised Jensen-Shannon divergence of on-policy distillation (GKD) with the
    student as policy and the teacher as reference. As there, ``beta=0`` means the forward KL and
    ``beta=1`` the reverse KL. Neither is a limit: the divergence goes to 0 at both ends, like
    :math:`\beta KL(q \| p)` and :math:`(1 - \beta) KL(p \| q)`.

    The op reads every kept row of both once, or twice for Jensen-Shannon, which needs the
    normalizers first. It accumulates in float32 or better and keeps nothing of the size of the
    logits. Each side gets a gradient in its own dtype if it requires one; the backward pass
    computes the softmax again.

    A class adds 0 where the distribution that weighs it gives it probability 0 (a logit of -inf, or
    underflow). It makes a KL +inf where only the other distribution does. The gradient of a -inf
    logit is 0; other gradients of an infinite KL are not finite.

    Args:
        logits: the policy's, ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``;
            float32, bfloat16 or float16 (float64 runs through the reference). Dimension V must have
            stride 1, otherwise it is copied; other strides are free.
        ref_logits: the reference's, of the same tokens and dtype; their strides may differ.
        mask: bool ``[N]``, ``[B, T]`` or jagged; ``None`` keeps all. A dropped token has divergence
            exactly 0, and its logits are not read.
        direction: ``"reverse"``, ``"forward"`` or ``"jensen_shannon"``.
        beta: the reference's share of the mixture, for ``"jensen_shannon"`` alone: 0, 1 or a number
            between that is at least 1e-30. ``None`` means 1/2.
        entropy: also compute the policy's entropy :math:`-\sum_v p_v \log p_v` of each kept row,
            with gradient.
        classes: how many classes count, the first ones, as where vocabularies differ in padding.
            Those beyond get gradient 0. ``None`` for all, which have to be equally many then.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads logits row *i - 1* of its own sequence, as causal models predict; the
            first token of every sequence has divergence 0. Packed logits then need ``offsets``.
            Without it token *i* reads logits row *i*.
        temperature: divisor of both logits, from 1e-30 to 1e30. A 0-dim tensor may change under
            ``torch.compile`` without a recompile. No gradient flows to it.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        :class:`ExactKL` of float32 ``[N]``, ``[B, T]`` or jagged like the logits. Rounding in the
        reference implementation alone makes a value negative. A row that is all -inf, or has a NaN
        or a +inf, gives NaN.

    Raises:
        TypeError: a mask that is not bool, logits that are not floating point.
        ValueError: an unknown direction, a beta out of range or without ``"jensen_shannon"``, more
            classes than both have, or shapes, dtypes, devices and offsets that do not fit.

    Example:
        >>> import torch
        >>> from fusedrl import exact_kl
        >>> policy, ref = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
        >>> exact_kl(policy, ref).kl  # uniform against 1/4, 3/4
        tensor([0.1438])
        >>> # With shift, of a model's own output, a row is about the token after it:
        >>> exact_kl(policy.expand(1, 3, 2), ref.expand(1, 3, 2), shift=True).kl
        tensor([[0.0000, 0.1438, 0.1438]])
        >>> exact_kl(policy, ref, direction="forward").kl
        tensor([0.1308])
        >>> exact_kl(policy, ref, direction="jensen_shannon", beta=0.5).kl
        tensor([0.0338])
    """
    _dispatch.check_flags(shift=shift, entropy=entropy)
    batch = _nested.pack("logits", logits, offsets)
    logits, offsets = batch.values, batch.offsets
    ref_logits, mask = batch.companion("ref_logits", ref_logits), batch.optional("mask", mask)
    divergence = chosen_divergence(direction, beta)
    check_rows_of_both("logits", logits, ref_logits, mask, offsets, shift)
    _dispatch.check_dtype("ref_logits", ref_logits, "logits", logits.dtype)
    check_classes(classes, "logits", logits.shape[-1], ref_logits.shape[-1])
    if classes is not None:
        logits, ref_logits = logits[..., :classes], ref_logits[..., :classes]
    chosen = _dispatch.choose(
        impl, "exact_kl", logits.device, logits.dtype, _dispatch.KERNEL_DTYPES
    )
    scale = _dispatch.temperature_tensor(temperature, logits.device, chosen)
    p, q = (ref_logits, logits) if divergence.swapped else (logits, ref_logits)
    if chosen == "reference":
        kl, entropies = reference.exact_kl(
            p, q, mask, offsets, shift, scale, divergence.beta, entropy
        )
        return answer(batch, divergence, kl, entropies if entropy else None)
    mask = None if mask is None else mask.contiguous()
    offsets = None if offsets is None else offsets.to(torch.int64).contiguous()
    p, q = _rows.with_unit_stride(p), _rows.with_unit_stride(q)
    args = (p, q, mask, offsets, shift, scale, divergence.beta, entropy)
    if _autograd.needs_grad(logits=logits, ref_logits=ref_logits, temperature=scale):
        kl, entropies = _autograd.apply(_Autograd, *args)
    else:
        kl, entropies, _ = torch.ops.fusedrl.exact_kl(*args)
    return answer(batch, divergence, kl, entropies if entropy else None)


def chosen_divergence(direction: str, beta: float | None) -> Divergence:
    """What is computed for a direction and a beta; refuses what neither exists nor fits."""
    _dispatch.check_choice("direction", direction, DIRECTIONS)
    if direction != "jensen_shannon":
        if beta is not None:
            raise ValueError(
                f"beta: expected none with direction {direction!r}, got {beta}; pass "
                'direction="jensen_shannon" with it'
            )
        return Divergence(1.0, direction == "forward")
    share = share_of(0.5 if beta is None else beta)
    if share is None:
        raise ValueError(
            f"beta: expected 0, 1 or a number between, from 1e-30 on, got {beta!r}; "
            "leave it out for 0.5"
        )
    return Divergence(1.0, True) if share == 0 else Divergence(share, False)


def share_of(beta: Any) -> float | None:
    """A beta as a number; ``None`` for one that no divergence exists for."""
    share = _dispatch.real_number(beta)
    known = share is not None and (share in (0, 1) or 1 / _dispatch.LARGEST <= share < 1)
    return float(share) if share is not None and known else None


def answer(
    batch: _nested.Batch, divergence: Divergence, kl: Tensor, entropies: Tensor | None
) -> ExactKL:
    """What the public functions return, of the entropies ``[..., 2]`` of p and q the policy's."""
    entropy = None if entropies is None else entropies[..., int(divergence.swapped)]
    return ExactKL(batch.result(kl), batch.result(entropy))


def check_rows_of_both(
    name: str,
    rows: Tensor,
    ref_rows: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
) -> None:
    """Refuse rows of the policy that are no batch, and those of the reference for other tokens."""
    ref = f"ref_{name}"
    _rows.check_rows(name, rows, offsets, shift)
    _dispatch.check_tensor(ref, ref_rows, like=f" like {name}")
    _rows.check_rows(ref, ref_rows, None, False)
    shape, ref_shape = rows.shape[:-1], ref_rows.shape[:-1]
    if shape != ref_shape:
        raise ValueError(
            f"{ref}: expected as many rows {tuple(shape)} as {name}, got {tuple(ref_shape)}; "
            "pass those of the same tokens"
        )
    _dispatch.check_device(ref, ref_rows, rows.device)
    _dispatch.check_mask(mask, shape, rows.device, f" for {name}", rows)


def check_classes(classes: int | None, name: str, own: int, ref: int) -> None:
    """Refuse more classes than policy and reference have, and two numbers of them without one."""
    if classes is None:
        if own != ref:
            raise ValueError(
                f"ref_{name}: expected the {own} classes of {name}, got {ref}; pass classes=, how "
                "many of the first ones count, if vocabularies differ in padding alone"
            )
    elif type(classes) is bool or not isinstance(classes, int) or not 1 <= classes <= min(own, ref):
        raise ValueError(
            f"classes: expected an integer from 1 to {min(own, ref)}, which {name} and ref_{name} "
            f"both have, got {classes!r}; pass how many tokens the tokenizer has"
        )


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        logits, ref_logits, mask, offsets, shift, temperature, beta, with_entropies = args
        kl, entropies, statistics = torch.ops.fusedrl.exact_kl(*args)
        ctx.save_for_backward(logits, ref_logits, mask, offsets, temperature, entropies, statistics)
        ctx.shift = shift
        ctx.beta = beta
        ctx.with_entropies = with_entropies
        if not with_entropies:
            ctx.mark_non_differentiable(entropies)
        return kl, entropies

    @staticmethod
    @_autograd.first_derivative_only("exact_kl")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_kl, grad_entropies = grads
        saved = ctx.saved_tensors
        logits, ref_logits, mask, offsets, temperature, entropies, statistics = saved
        wants_grad, wants_grad_ref = ctx.needs_input_grad[:2]
        grad, grad_ref = torch.ops.fusedrl.exact_kl_backward(
            grad_kl.contiguous(),
            grad_entropies.contiguous() if ctx.with_entropies else None,
            logits,
            ref_logits,
            mask,
            offsets,
            ctx.shift,
            temperature,
            ctx.beta,
            entropies,
            statistics,
            wants_grad,
            wants_grad_ref,
        )
        both = (grad if wants_grad else None, grad_ref if wants_grad_ref else None)
        return *both, None, None, None, None, None, None


def fake_results(batch: Tensor, entropies: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Divergences, entropies and statistics of the tokens of a batch, without values."""
    rows = batch.shape[:-1]
    dtype = _dispatch.result_dtype(batch)
    return (
        batch.new_empty(rows, dtype=dtype),
        batch.new_empty((*rows, 2) if entropies else (0,), dtype=dtype),
        batch.new_empty((*rows, 6), dtype=dtype),
    )


def _fake(logits: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, entropies = options
    return fake_results(logits, entropies)


def _fake_backward(
    grad_kl: Tensor, grad_entropies: Tensor | None, logits: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    *_, wants_grad, wants_grad_ref = options
    return (
        logits.new_empty(logits.shape if wants_grad else (0,)),
        logits.new_empty(logits.shape if wants_grad_ref else (0,)),
    )


_dispatch.register_fakes({"exact_kl": _fake, "exact_kl_backward": _fake_backward})
