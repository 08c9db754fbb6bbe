"""Divergence from a teacher known by a few classes, from hidden states and a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _head, _rounding, _rows, _saved_tensors, _stored
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._sequence_parts import accepts_parts
from fusedrl.ops.linear_top_k_kl import reference
from fusedrl.ops.top_k_kl import teachers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["linear_top_k_kl"]


@accepts_parts("ids", "teacher_log_probs", "mask")
@accepts_nested("ids", "teacher_log_probs")
def linear_top_k_kl(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    tail: str = "bucket",
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    sequence_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Tensor:
    r"""The divergence of :func:`top_k_kl` from hidden states and a linear head, a tile at a time.

    The student's logits are ``scale * (hidden @ weight.T + bias)``, capped to
    ``softcap * tanh(logits / softcap)`` where a softcap is given. They exist a tile at a time, and
    only for the kept rows; the backward pass computes them again, or reads those that the CPU has
    stored (see :func:`linear_token_log_probs`). Gradients reach ``hidden``, ``weight`` and
    ``bias``, each only where it is required.

    In bfloat16 on a CPU with AVX512-BF16, ``torch.set_float32_matmul_precision("medium")`` rounds
    the gradients of logits to bfloat16 before they are multiplied, which is faster.

    Args:
        hidden: the student's, ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``;
            float32, bfloat16 or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``.
        ids: integer classes that the teacher's log-probs are of, ``[N, k]``, ``[B, T, k]`` or
            jagged ``[B, j, k]``, every class at most once a token; one below 0 is no class.
        teacher_log_probs: floating point, of the shape of ``ids``.
        mask: bool ``[N]``, ``[B, T]`` or jagged; ``None`` keeps all. A dropped token has divergence
            exactly 0, and neither its hidden state nor its ids and log-probs are read.
        direction: ``"reverse"`` KL(student || teacher), ``"forward"`` or ``"jensen_shannon"``.
        beta: the teacher's share of the mixture, for ``"jensen_shannon"`` alone: 0 (the forward KL,
            as in GKD), 1 (the reverse KL) or from 1e-30 to below 1. ``None`` is 1/2.
        tail: ``"bucket"``, the rest as one class more, or ``"renormalize"``, without the rest.
        bias: ``[V]`` of the dtype of ``weight``.
        softcap: positive bound of the logits.
        scale: positive factor of the logits.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads row *i - 1* of its own sequence; the first token of every sequence
            has divergence 0. Packed hidden states then need ``offsets``. Without it token *i* reads
            row *i*.
        sequence_group: the process group over whose ranks sequences are split into contiguous
            parts, in the order of the ranks (context parallelism). With ``shift`` the first token
            of a part reads the last row of the rank before. Every rank calls, and differentiates.
            ``offsets`` are those of all ranks' tokens, ``k`` is the same on every rank; nested
            input is refused.
        temperature: positive divisor of the logits. No gradient flows to it.
        batch_invariant: rows are multiplied in blocks of a fixed size, so that a row's bits do not
            depend on the batch around it.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        float32 ``[N]``, ``[B, T]`` or jagged like the hidden states.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`top_k_kl` does.

    Example:
        >>> import torch
        >>> from fusedrl import linear_top_k_kl, top_k_kl
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(2, 3, 8), torch.randn(100, 8)
        >>> teacher, ids = torch.randn(2, 3, 100).log_softmax(-1).topk(5)
        >>> kl = linear_top_k_kl(hidden, weight, ids, teacher, shift=True)
        >>> torch.allclose(kl, top_k_kl(hidden @ weight.T, ids, teacher, shift=True), rtol=1e-4)
        True
    """
    _dispatch.check_tensor("hidden", hidden, _dispatch.DENSE, _dispatch.NESTED)
    head = _head.prepare("", hidden, weight, bias, scale, softcap)
    _rows.check_rows("hidden", head.hidden, offsets, shift)
    teacher = teachers.prepare(
        *(head.hidden, "hidden", len(head.weight), ids, teacher_log_probs),
        *(mask, offsets, shift, direction, beta, tail),
    )
    chosen = _dispatch.choose(impl, "linear_top_k_kl", head.hidden.device, head.hidden.dtype)
    divisor = _dispatch.temperature_tensor(temperature, head.hidden.device, chosen)
    _dispatch.check_counted_on_host(mask, shift, head.hidden.device)
    if chosen == "reference":
        _dispatch.check_without_kernel("batch_invariant", batch_invariant, False)
        log_probs = reference.log_probs(head, ids, mask, offsets, shift, divisor)
    else:
        batch = (
            teacher.ids,
            None if mask is None else mask.contiguous(),
            None if offsets is None else offsets.to(torch.int64).contiguous(),
        )
        args = (
            *(head.hidden, head.weight, head.bias, *batch, shift, divisor),
            *(head.scale, head.softcap, batch_invariant),
        )
        tensors = {"hidden": head.hidden, "weight": head.weight, "bias": head.bias}
        if _autograd.needs_grad(**tensors, temperature=divisor):
            log_probs = _autograd.apply(_Autograd, *args)
        else:
            log_probs = torch.ops.fusedrl.linear_top_k_kl_log_probs(*args, 0)[0]
    return teachers.divergence(log_probs, teacher)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, weight, bias, ids, mask, offsets, shift, temperature, *options = args
        results = torch.ops.fusedrl.linear_top_k_kl_log_probs(*args, _stored.stored_bytes(hidden))
        _saved_tensors.save(ctx, hidden, weight, bias, ids, mask, offsets, temperature, *results)
        ctx.options = (shift, *options)
        return results[0]

    @staticmethod
    @_autograd.first_derivative_only("linear_top_k_kl")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, mask, offsets, temperature, *results = _saved_tensors.saved(ctx)
        shift, scale, softcap, batch_invariant = ctx.options
        of_hidden, of_weight, of_bias, *_ = wanted = ctx.needs_input_grad
        found = torch.ops.fusedrl.linear_top_k_kl_log_probs_backward(
            *(grads[0].contiguous(), hidden, weight, bias, ids, mask, offsets, shift, temperature),
            *(scale, softcap, *results, batch_invariant, of_hidden, of_weight, of_bias),
            rounds_grads=_rounding.rounds_grads(hidden, grads[0]),
        )
        of_head = (grad if want else None for grad, want in zip(found, wanted, strict=False))
        return *of_head, *(None,) * 8


def _fake(
    hidden: Tensor, weight: Tensor, bias: Any, ids: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, most_bytes = options
    rows, k = hidden.shape[:-1], ids.shape[-1]
    dtype = _dispatch.result_dtype(hidden)
    return (
        hidden.new_empty((*rows, k + 1), dtype=dtype),
        hidden.new_empty((*rows, 2), dtype=dtype),
        _stored.fake(weight, most_bytes, torch.float32),
        _stored.fake(weight, most_bytes, torch.int64),
    )


def _fake_backward(
    grad_log_probs: Tensor, *args: Any, rounds_grads: Tensor | None = None
) -> tuple[Tensor, ...]:
    hidden = args[0]
    return tuple(
        x.new_empty(x.shape) if want else hidden.new_empty((0,))
        for x, want in zip(args[:3], args[-3:], strict=True)
    )


_dispatch.register_fakes(
    {"linear_top_k_kl_log_probs": _fake, "linear_top_k_kl_log_probs_backward": _fake_backward}
)
