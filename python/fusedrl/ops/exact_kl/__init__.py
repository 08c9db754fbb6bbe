"""Exact divergence between policy and reference over the whole vocabulary, for each token."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _nested, _rows
from fusedrl.ops.exact_kl import reference

__all__ = ["DIRECTIONS", "ExactKL", "exact_kl"]

DIRECTIONS = ("reverse", "forward", "jensen_shannon")


class ExactKL(NamedTuple):
    """Divergence and policy entropy of each token, in nats and float32, shaped like the tokens.

    ``kl`` is the divergence in the direction of the call; ``entropy`` is ``None`` unless requested.
    """

    kl: Tensor
    entropy: Tensor | None


class Divergence(NamedTuple):
    """The divergence of a call: KL(p || q) if ``beta`` is 1, else that from a mixture of p and q.

    The policy is p, or q if ``swapped``.
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
    r"""Divergence between the distributions of policy and reference for each token.

    With the policy :math:`p = \mathrm{softmax}(\text{logits} / \text{temperature})`, the reference
    :math:`q` likewise and :math:`m = (1 - \beta) p + \beta q`, in nats:

    - ``"reverse"``: :math:`KL(p \| q) = \sum_v p_v (\log p_v - \log q_v)`
    - ``"forward"``: :math:`KL(q \| p)`
    - ``"jensen_shannon"``: :math:`(1 - \beta) KL(p \| m) + \beta KL(q \| m)`, the divergence of
      on-policy distillation (GKD) with the student as policy. ``beta=0`` means the forward KL and
      ``beta=1`` the reverse KL, which are not its limits: it goes to 0 at both ends.

    Sums are float32 or better, and nothing of the size of the logits is stored. Each side gets a
    gradient in its dtype if it requires one.

    In KL(p || q), a class with p = 0 (a logit of -inf, or underflow) adds 0, and one with only
    q = 0 makes the KL +inf. The gradient of a -inf logit is 0; other gradients of an infinite KL
    are not finite.

    Args:
        logits: the policy's, ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``;
            float32, bfloat16 or float16 (float64 runs through the reference). Dimension V must have
            stride 1, otherwise it is copied; other strides are free.
        ref_logits: the reference's, of the same tokens and dtype; their strides may differ.
        mask: bool ``[N]``, ``[B, T]`` or jagged; ``None`` keeps all. A dropped token has divergence
            exactly 0, and its logits are not read.
        direction: ``"reverse"``, ``"forward"`` or ``"jensen_shannon"``.
        beta: the reference's share of the mixture, only for ``"jensen_shannon"``: 0, or a number
            from 1e-30 to 1. ``None`` means 1/2.
        entropy: also compute the policy's entropy :math:`-\sum_v p_v \log p_v` of each kept row,
            with gradient.
        classes: use only this many classes, the first ones, if vocabularies differ in padding. The
            others get gradient 0. ``None`` uses all and requires equal numbers of them.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads logits row *i - 1* of its sequence, as causal models predict, instead
            of row *i*; the first token of every sequence has divergence 0. Packed logits then need
            ``offsets``.
        temperature: divisor of both logits, from 1e-30 to 1e30. A 0-dim tensor may change under
            ``torch.compile`` without a recompile. No gradient flows to it.
        impl: ``"auto"`` uses the device's compiled kernel, or falls back to plain torch; ``"cpu"``
            and ``"cuda"`` require the kernel, ``"reference"`` uses plain torch.

    Returns:
        :class:`ExactKL` of float32 ``[N]``, ``[B, T]`` or jagged like the logits. Only the
        reference implementation may round below 0. A row of only -inf, or with NaN or +inf, gives
        NaN.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, or that does not fit the
            others.

    Example:
        >>> import torch
        >>> from fusedrl import exact_kl
        >>> policy, ref = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
        >>> exact_kl(policy, ref).kl  # uniform against 1/4, 3/4
        tensor([0.1438])
        >>> # With shift, row i of a model's output predicts token i + 1:
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
    """The divergence for a direction and a beta, after checking both."""
    _dispatch.check_choice("direction", direction, DIRECTIONS)
    if direction != "jensen_shannon":
        if beta is not None:
            raise ValueError(
                f"beta: expected None with direction {direction!r}, got {beta}; pass it with "
                'direction="jensen_shannon"'
            )
        return Divergence(1.0, direction == "forward")
    share = share_of(0.5 if beta is None else beta)
    if share is None:
        raise ValueError(
            f"beta: expected 0 or a number from 1e-30 to 1, got {beta!r}; leave it out for 0.5"
        )
    return Divergence(1.0, True) if share == 0 else Divergence(share, False)


def share_of(beta: Any) -> float | None:
    """A beta as a number; ``None`` if it is invalid."""
    share = _dispatch.real_number(beta)
    valid = share is not None and (share in (0, 1) or 1 / _dispatch.LARGEST <= share < 1)
    return float(share) if share is not None and valid else None


def answer(
    batch: _nested.Batch, divergence: Divergence, kl: Tensor, entropies: Tensor | None
) -> ExactKL:
    """The result of the public functions; ``entropies`` ``[..., 2]`` are those of p and q."""
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
    """Refuse rows of the policy that are no batch, or that do not match those of the reference."""
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


def check_classes(classes: int | None, name: str, policy: int, ref: int) -> None:
    """Refuse more classes than both sides have, or different numbers of them if it is ``None``."""
    if classes is None:
        if policy != ref:
            raise ValueError(
                f"ref_{name}: expected the {policy} classes of {name}, got {ref}; pass classes=, "
                "the number of leading ones to use, if vocabularies differ only in padding"
            )
        return
    most = min(policy, ref)
    if type(classes) is bool or not isinstance(classes, int) or not 1 <= classes <= most:
        raise ValueError(
            f"classes: expected an integer from 1 to {most}, which {name} and ref_{name} "
            f"both have, got {classes!r}; pass len(tokenizer)"
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
    """Fakes of the divergences, entropies and statistics of the tokens of a batch."""
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
