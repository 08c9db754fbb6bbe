"""KL divergence of the policy from its reference over the whole vocabulary, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _rows
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._sequence_parts import accepts_parts
from fusedrl.ops.exact_kl import reference

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DIRECTIONS", "exact_kl"]

DIRECTIONS = ("reverse", "forward", "jensen_shannon")


@accepts_parts("mask")
@accepts_nested("ref_logits")
def exact_kl(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    offsets: Tensor | None = None,
    shift: bool = False,
    sequence_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
) -> Tensor:
    r"""Divergence between the policy's and the reference's distribution of each token.

    With the policy :math:`p = \mathrm{softmax}(\text{logits} / \text{temperature})`, the reference
    :math:`q` likewise and :math:`m = (p + q) / 2`, in nats:
    ``"reverse"`` :math:`KL(p \| q) = \sum_v p_v (\log p_v - \log q_v)`,
    ``"forward"`` :math:`KL(q \| p)`,
    ``"jensen_shannon"`` :math:`\frac{1}{2} KL(p \| m) + \frac{1}{2} KL(q \| m) \le \log 2`.
    Reads every kept row of both once (Jensen-Shannon twice: it needs the normalizers first),
    accumulates in float32 or better and keeps nothing of the size of the logits. Gradients reach
    both in their own dtype, each only if it requires one; the backward pass recomputes the softmax.

    A class of probability 0 (a logit of -inf, or underflow) adds 0 where p is the weight, and makes
    a KL +inf where only q has it. The gradient of a -inf logit is 0; other gradients of an infinite
    KL are not finite.

    Args:
        logits: the policy's, ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``;
            float32, bfloat16 or float16 (float64 runs through the reference). Dimension V must have
            stride 1, otherwise it is copied; other strides are free.
        ref_logits: the reference's, in the same shape and dtype, with strides of their own.
        mask: bool ``[N]``, ``[B, T]`` or jagged; ``None`` keeps all. A dropped token has divergence
            exactly 0, and its logits are not read.
        direction: ``"reverse"``, ``"forward"`` or ``"jensen_shannon"``.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads logits row *i - 1* of its own sequence, as causal models predict; the
            first token of every sequence has divergence 0. Packed logits then need ``offsets``.
        sequence_group: the process group over whose ranks sequences are split into contiguous
            parts, in the order of the ranks (context parallelism). With ``shift`` the first token
            of a part reads the last row of the rank before. Every rank calls, and differentiates.
            ``offsets`` are those of all ranks' tokens; nested input is refused.
        temperature: positive divisor of both logits. Pass a 0-dim tensor to vary it under
            ``torch.compile`` without a recompile. No gradient flows to it.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"reference"``.

    Returns:
        float32 ``[N]``, ``[B, T]`` or jagged like the logits; never negative but for rounding in
        the reference implementation. A row of -inf only, a NaN or a +inf gives NaN.

    Raises:
        TypeError: a mask that is not bool, logits that are not floating point.
        ValueError: an unknown direction, or shapes, dtypes, devices and offsets that do not fit.

    Example:
        >>> import torch
        >>> from fusedrl import exact_kl
        >>> policy, ref = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.0, 1.0986123]])
        >>> exact_kl(policy, ref)  # uniform against 1/4, 3/4
        tensor([0.1438])
        >>> exact_kl(policy, ref, direction="forward")
        tensor([0.1308])
    """
    _dispatch.check_tensor("logits", logits, _dispatch.DENSE, _dispatch.NESTED)
    check_direction(direction)
    _check(logits, ref_logits, mask, offsets, shift)
    chosen = _dispatch.choose(
        impl, "exact_kl", logits.device, logits.dtype, _dispatch.KERNEL_DTYPES
    )
    scale = _dispatch.temperature_tensor(temperature, logits.device, chosen)
    jensen_shannon = direction == "jensen_shannon"
    p, q = (ref_logits, logits) if direction == "forward" else (logits, ref_logits)
    if chosen == "reference":
        return reference.exact_kl(p, q, mask, offsets, shift, scale, jensen_shannon)
    mask = None if mask is None else mask.contiguous()
    offsets = None if offsets is None else offsets.to(torch.int64).contiguous()
    p, q = _rows.with_unit_stride(p), _rows.with_unit_stride(q)
    args = (p, q, mask, offsets, shift, scale, jensen_shannon)
    if _autograd.needs_grad(logits=logits, ref_logits=ref_logits, temperature=scale):
        return _Autograd.apply(*args)
    return torch.ops.fusedrl.exact_kl(*args)[0]


def check_direction(direction: str) -> None:
    """Refuse an unknown direction."""
    if direction not in DIRECTIONS:
        raise ValueError(f"direction: expected one of {', '.join(DIRECTIONS)}, got {direction!r}")


def _check(
    logits: Tensor,
    ref_logits: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
) -> None:
    _rows.check_rows("logits", logits, offsets, shift)
    _dispatch.check_tensor("ref_logits", ref_logits, like=" like the logits")
    _dispatch.check_same("ref_logits", ref_logits, logits.shape, logits.device)
    if ref_logits.dtype != logits.dtype:
        raise ValueError(
            f"ref_logits: expected {logits.dtype} like the logits, got {ref_logits.dtype}; "
            f"convert it with .to({logits.dtype})"
        )
    _dispatch.check_mask(mask, logits.shape[:-1], logits.device)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        logits, ref_logits, mask, offsets, shift, temperature, jensen_shannon = args
        kl, statistics = torch.ops.fusedrl.exact_kl(*args)
        ctx.save_for_backward(logits, ref_logits, mask, offsets, temperature, statistics)
        ctx.shift = shift
        ctx.jensen_shannon = jensen_shannon
        return kl

    @staticmethod
    @_autograd.first_derivative_only("exact_kl")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, ref_logits, mask, offsets, temperature, statistics = ctx.saved_tensors
        wants_grad, wants_grad_ref = ctx.needs_input_grad[:2]
        grad, grad_ref = torch.ops.fusedrl.exact_kl_backward(
            grads[0].contiguous(),
            logits,
            ref_logits,
            mask,
            offsets,
            ctx.shift,
            temperature,
            ctx.jensen_shannon,
            statistics,
            wants_grad,
            wants_grad_ref,
        )
        both = (grad if wants_grad else None, grad_ref if wants_grad_ref else None)
        return *both, None, None, None, None, None


def _fake(logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows = logits.shape[:-1]
    dtype = _dispatch.result_dtype(logits)
    return logits.new_empty(rows, dtype=dtype), logits.new_empty((*rows, 6), dtype=dtype)


def _fake_backward(grad_kl: Tensor, logits: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    *_, wants_grad, wants_grad_ref = options
    return (
        logits.new_empty(logits.shape if wants_grad else (0,)),
        logits.new_empty(logits.shape if wants_grad_ref else (0,)),
    )


_dispatch.register_fakes({"exact_kl": _fake, "exact_kl_backward": _fake_backward})
