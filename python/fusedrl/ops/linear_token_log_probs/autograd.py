"""Autograd and fakes of the compiled ops behind ``linear_token_log_probs``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.compat.torch import assert_on_device
from fusedrl.ops import _autograd, _dispatch, _rounding, _stored
from fusedrl.ops.linear_token_log_probs.arguments import Call
from fusedrl.ops.token_log_probs.reference import rows_of_tokens

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def statistics(chosen: str, args: tuple[Any, ...]) -> Tensor:
    """Max, sum, dot and target ``[..., 4]`` of every token's logits over the weight's classes."""
    return _statistics(chosen, args, 0)[0]


def _statistics(
    chosen: str, args: tuple[Any, ...], most_bytes: int, sums_weights: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`statistics`, stored logits or sums of weights, and the kept tokens."""
    if chosen == "triton":
        return torch.ops.fusedrl.linear_token_log_probs_triton(*args, most_bytes)
    rounds = _rounding.rounds_grads(args[0], args[0]) if sums_weights else None
    return torch.ops.fusedrl.linear_token_log_probs(
        *args, most_bytes, sums_weights, rounds_grads=rounds
    )


def run(call: Call, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy over the classes of all ranks of the group."""
    if call.needs_grad:
        return _autograd.apply(_Autograd, call.chosen, group, _sums_weights(call), *call.args)
    parts = statistics(call.chosen, call.args)
    log_probs, row_entropy, _ = _finish(parts, group, call.args)
    return log_probs, row_entropy


def _sums_weights(call: Call) -> bool:
    """Whether the forward pass computes the sum of weights for the gradient of the hidden states.

    The gradient is ``c (w_y - sum_v p_v w_v)``, where only ``c`` depends on the loss. That of an
    entropy needs another sum, and the order of summation is not batch-invariant.
    """
    _, weight, bias, *_, entropy, _, batch_invariant = call.args
    trains = weight.requires_grad or (bias is not None and bias.requires_grad)
    narrow = call.chosen == "cuda" and weight.dtype == torch.float16  # exponentials overflow
    return call.chosen != "triton" and not (trains or entropy or batch_invariant or narrow)


def _finish(
    parts: Tensor, group: ProcessGroup | None, args: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and normalizers from the statistics of all ranks of the group."""
    *_, temperature, _, _, entropy, _, _ = args
    all_parts = parts[None] if group is None else gathered(parts[None], group)
    return torch.ops.fusedrl.linear_token_log_probs_finish(all_parts, temperature, entropy)


def gathered(statistics: Tensor, group: ProcessGroup) -> Tensor:
    """The statistics ``[ranks, ..., 4]`` of all ranks, from ``[1, ..., 4]`` of this one."""
    ranks = torch.distributed.get_world_size(group)
    out = statistics.new_empty((ranks, *statistics.shape[1:]))
    torch.distributed.all_gather(list(out.unbind()), statistics[0], group=group)
    return out


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chosen: str, group: Any, sums_weights: bool, *args: Any
    ) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, tokens, mask, offsets, shift, temperature, *options = args
        scale, softcap, entropy, vocab_offset, batch_invariant = options
        most_bytes = 0 if sums_weights else _stored.stored_bytes(hidden, weight)
        parts, *stored = _statistics(chosen, args, most_bytes, sums_weights)
        log_probs, row_entropy, normalizers = _finish(parts, group, args)
        ctx.save_for_backward(
            *(hidden, weight, bias, tokens, mask, offsets, temperature),
            *(log_probs, row_entropy, normalizers, *stored),
            parts if sums_weights else None,
        )
        ctx.options = (group, shift, scale, softcap, entropy, vocab_offset, batch_invariant)
        if not entropy:
            ctx.mark_non_differentiable(row_entropy)
        return log_probs, row_entropy

    @staticmethod
    @_autograd.first_derivative_only(
        "linear_token_log_probs", "pass the whole vocabulary with impl='reference', which has one"
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        saved = ctx.saved_tensors
        hidden, weight, bias, tokens, mask, offsets, temperature, *results, parts = saved
        group, shift, scale, softcap, entropy, vocab_offset, batch_invariant = ctx.options
        *_, of_hidden, of_weight, of_bias = ctx.needs_input_grad[:6]
        if parts is not None:
            of_head = (_grad_of_hidden(saved, ctx.options, grad_log_probs), None, None)
        else:
            of_head = torch.ops.fusedrl.linear_token_log_probs_backward(
                grad_log_probs.contiguous(),
                grad_entropy.contiguous() if entropy else None,
                *(hidden, weight, bias, tokens, mask, offsets, shift, temperature, scale, softcap),
                *(*results, vocab_offset, batch_invariant, of_hidden, of_weight, of_bias),
                rounds_grads=_rounding.rounds_grads(hidden, grad_log_probs),
            )
        if group is not None and of_hidden:
            torch.distributed.all_reduce(of_head[0], group=group)
            of_head = (of_head[0].to(hidden.dtype), *of_head[1:])
        wanted = (of_hidden, of_weight, of_bias)
        found = (grad if want else None for grad, want in zip(of_head, wanted, strict=True))
        return None, None, None, *found, *(None,) * 10


def _grad_of_hidden(
    saved: Sequence[Tensor], options: tuple[Any, ...], grad_log_probs: Tensor
) -> Tensor:
    """The gradient of the hidden states from the sums of weights that the forward pass computed.

    The sums are relative to the largest logit of these classes, and exclude the target, so that
    nothing cancels if its probability is close to 1.
    """
    hidden, weight, _, tokens, mask, offsets, temperature, *results, parts = saved
    log_probs, _, normalizers, sums, _ = results
    _, shift, scale, softcap, _, vocab_offset, _ = options
    _, keep = rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.reshape(-1)
    targets = tokens.reshape(-1) - (vocab_offset or 0)
    inside = keep & (targets >= 0) & (targets < len(weight))
    largest, _, _, target_logit = parts.view(-1, 4).unbind(-1)
    normalizer, log_sum = normalizers.view(-1, 2).unbind(-1)
    inverse = temperature.reciprocal().to(hidden.device, torch.float32)
    upstream = grad_log_probs.reshape(-1) * inverse
    of_target = -torch.expm1(log_probs.reshape(-1)) * scale * upstream
    if softcap:
        of_target = of_target * (1 - (target_logit / softcap).square())
    of_sums = upstream * ((largest - normalizer) * inverse - log_sum).exp()
    columns = (
        torch.where(inside, of_target, 0),
        torch.where(keep, of_sums, 0),
        torch.where(inside, targets, 0),
        keep,
    )
    # From the order of tokens to that of the rows that they read; 0 for rows that no token reads.
    of_target, of_sums, targets, keep = (x.roll(-1) if shift else x for x in columns)
    grad = of_target[:, None] * weight[targets] - of_sums[:, None] * sums.view(-1, sums.shape[-1])
    grad = grad.masked_fill_(~keep[:, None], 0).view(hidden.shape)
    return grad if vocab_offset is not None else grad.to(hidden.dtype)


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Any,
    tokens: Tensor,
    *options: Any,
    rounds_grads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, most_bytes, sums_weights = options
    of_rows = hidden.new_empty(hidden.shape, dtype=torch.float32)
    return (
        hidden.new_empty((*tokens.shape, 4), dtype=_dispatch.result_dtype(hidden)),
        of_rows if sums_weights else _stored.fake(weight, most_bytes, torch.float32),
        _stored.fake(weight, most_bytes, torch.int64),
    )


def _fake_finish(
    parts: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = parts.shape[1:-1]
    log_probs, row_entropy, normalizers = (
        parts.new_empty(s) for s in (shape, shape if entropy else (0,), (*shape, 2))
    )
    return log_probs, row_entropy, normalizers


def _fake_backward(*args: Any, rounds_grads: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    _, _, hidden, weight, bias, *_, vocab_offset, _, of_hidden, of_weight, of_bias = args
    # The ranks of a sharded vocabulary sum their gradients before rounding.
    dtype = hidden.dtype if vocab_offset is None else _dispatch.result_dtype(hidden)
    return (
        hidden.new_empty(hidden.shape, dtype=dtype) if of_hidden else hidden.new_empty((0,)),
        weight.new_empty(weight.shape) if of_weight else hidden.new_empty((0,)),
        bias.new_empty(bias.shape) if of_bias else hidden.new_empty((0,)),
    )


@torch.library.custom_op("fusedrl::linear_token_log_probs_triton", mutates_args=())
def _triton(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    scale: float,
    softcap: float,
    entropy: bool,
    vocab_offset: int | None,
    batch_invariant: bool,
    stored_bytes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    # The Triton kernel is always batch-invariant, so `batch_invariant` is not used.
    from fusedrl.ops.linear_token_log_probs import triton

    rows, keep = rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = slice(None) if mask is None and not shift else keep.nonzero().squeeze(-1)
    targets = tokens.flatten()[kept] - (vocab_offset or 0)
    outside = (targets < 0) | (targets >= len(weight))
    if vocab_offset is None:
        assert_on_device(
            ~outside.any(),
            "tokens: expected values in [0, V), got values outside; drop them with mask",
        )
    columns = triton.partials(
        hidden.reshape(-1, hidden.shape[-1])[rows[kept]],
        *(weight, bias, targets),
        _inverse_on(hidden, temperature),
        *(scale, softcap, entropy),
    )
    parts = torch.stack((*columns[:3], columns[3].masked_fill(outside, -torch.inf)), -1)
    # Statistics that give log-prob and entropy 0 to a dropped token when shards are combined.
    out = parts.new_zeros(tokens.numel(), 4)
    if vocab_offset:
        out[:, ::3] = -torch.inf
    else:
        out[:, 1] = 1.0
    out[kept] = parts
    stored = kept if isinstance(kept, Tensor) and stored_bytes else tokens.new_empty(0)
    return out.view(*tokens.shape, 4), parts.new_empty(0), stored


def _inverse_on(hidden: Tensor, temperature: Tensor) -> Tensor:
    """``1 / temperature`` on the device of the hidden states, without waiting for that device."""
    inverse = temperature.reciprocal()
    if inverse.device != hidden.device:
        return hidden.new_full((1,), inverse.item(), dtype=torch.float32)
    return inverse.to(torch.float32).reshape(1)


_dispatch.register_fakes(
    {
        "linear_token_log_probs": _fake,
        "linear_token_log_probs_finish": _fake_finish,
        "linear_token_log_probs_backward": _fake_backward,
        "linear_token_log_probs_triton": _fake,
    }
)
