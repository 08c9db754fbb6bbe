"""Exact divergence over the whole vocabulary from the hidden states and heads of two models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _head, _nested, _rounding, _stored
from fusedrl.ops.exact_kl import (
    ExactKL,
    answer,
    check_classes,
    check_rows_of_both,
    chosen_divergence,
    fake_results,
)
from fusedrl.ops.linear_exact_kl import reference

__all__ = ["linear_exact_kl"]


def linear_exact_kl(
    hidden: Tensor,
    weight: Tensor,
    ref_hidden: Tensor,
    ref_weight: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    entropy: bool = False,
    classes: int | None = None,
    bias: Tensor | None = None,
    ref_bias: Tensor | None = None,
    softcap: float | None = None,
    ref_softcap: float | None = None,
    scale: float | None = None,
    ref_scale: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> ExactKL:
    r"""Divergence between two linear heads, without materialising their logits.

    It is the divergence of :func:`exact_kl`. The policy's logits are
    ``scale * (hidden @ weight.T + bias)``, capped to ``softcap * tanh(logits / softcap)`` if a
    softcap is given; the reference's are computed in the same way. Both exist one tile at a time,
    and are stored or recomputed as in :func:`linear_token_log_probs`. Gradients are computed only
    for tensors that require them.

    Arguments that are not listed are those of :func:`exact_kl`; ``batch_invariant`` is that of
    :func:`linear_token_log_probs`.

    Args:
        hidden: the policy's, ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``;
            float32, bfloat16 or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``.
        ref_hidden: the reference's, of the same tokens and dtype; its width ``ref_H`` may differ.
        ref_weight: ``[V, ref_H]``.
        classes: use only this many classes, the first ones, as in :func:`exact_kl`; with ``None``
            both heads need the same ``V``.
        bias: ``[V]`` of the policy's head, of the dtype of ``weight``.
        ref_bias: ``[V]`` of the reference's head.
        softcap: positive bound of the policy's logits.
        ref_softcap: positive bound of the reference's logits.
        scale: positive factor of the policy's logits.
        ref_scale: positive factor of the reference's logits.

    Returns:
        :class:`ExactKL` of float32 ``[N]``, ``[B, T]`` or jagged like the hidden states.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, or that does not fit the
            others.

    Example:
        >>> import torch
        >>> from fusedrl import exact_kl, linear_exact_kl
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(2, 3, 8), torch.randn(100, 8)
        >>> ref_hidden, ref_weight = torch.randn(2, 3, 16), torch.randn(100, 16)
        >>> kl = linear_exact_kl(hidden, weight, ref_hidden, ref_weight, shift=True).kl
        >>> from_logits = exact_kl(hidden @ weight.T, ref_hidden @ ref_weight.T, shift=True)
        >>> torch.allclose(kl, from_logits.kl, rtol=1e-4)
        True
    """
    divergence = chosen_divergence(direction, beta)
    _dispatch.check_flags(shift=shift, entropy=entropy, batch_invariant=batch_invariant)
    batch = _nested.pack("hidden", hidden, offsets)
    hidden, offsets = batch.values, batch.offsets
    ref_hidden, mask = batch.companion("ref_hidden", ref_hidden), batch.optional("mask", mask)
    check_rows_of_both("hidden", hidden, ref_hidden, mask, offsets, shift)
    head = _head.prepare("", hidden, weight, bias, scale, softcap)
    ref_head = _head.prepare("ref_", ref_hidden, ref_weight, ref_bias, ref_scale, ref_softcap)
    _dispatch.check_dtype("ref_hidden", ref_head.hidden, "hidden", head.hidden.dtype)
    check_classes(classes, "weight", len(head.weight), len(ref_head.weight))
    if classes is not None:
        head, ref_head = head.first(classes), ref_head.first(classes)
    chosen = _dispatch.choose(impl, "linear_exact_kl", head.hidden.device, head.hidden.dtype)
    divisor = _dispatch.temperature_tensor(temperature, head.hidden.device, chosen)
    _dispatch.check_counted_on_host(mask, shift, head.hidden.device)
    p, q = (ref_head, head) if divergence.swapped else (head, ref_head)
    if chosen == "reference":
        _dispatch.check_without_kernel("batch_invariant", batch_invariant, False)
        kl, entropies = reference.linear_exact_kl(
            p, q, mask, offsets, shift, divisor, divergence.beta, entropy
        )
        return answer(batch, divergence, kl, entropies if entropy else None)
    args = (
        *(p.hidden, p.weight, p.bias, p.scale, p.softcap),
        *(q.hidden, q.weight, q.bias, q.scale, q.softcap),
        None if mask is None else mask.contiguous(),
        None if offsets is None else offsets.to(torch.int64).contiguous(),
        *(shift, divisor, divergence.beta, entropy, batch_invariant),
    )
    if _autograd.needs_grad(
        hidden=head.hidden,
        weight=head.weight,
        bias=head.bias,
        ref_hidden=ref_head.hidden,
        ref_weight=ref_head.weight,
        ref_bias=ref_head.bias,
        temperature=divisor,
    ):
        kl, entropies = _autograd.apply(_Autograd, *args)
    else:
        # Without a gradient, only a mixture reads its logits twice.
        most_bytes = _stored.stored_bytes(head.hidden, head.weight) if divergence.beta < 1 else 0
        kl, entropies, *_ = torch.ops.fusedrl.linear_exact_kl(*args, most_bytes)
    return answer(batch, divergence, kl, entropies if entropy else None)


# Positions of the op's arguments that may require a gradient.
_DIFFERENTIABLE = (0, 1, 2, 5, 6, 7)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        *head, with_entropies, batch_invariant = args
        most_bytes = _stored.stored_bytes(args[0], args[1])
        kl, entropies, *results = torch.ops.fusedrl.linear_exact_kl(*args, most_bytes)
        saved = [*head, batch_invariant]
        tensors = [x if isinstance(x, Tensor) else None for x in saved]
        ctx.save_for_backward(entropies, *results, *tensors)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in saved]
        ctx.with_entropies = with_entropies
        if not with_entropies:
            ctx.mark_non_differentiable(entropies)
        return kl, entropies

    @staticmethod
    @_autograd.first_derivative_only("linear_exact_kl")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_kl, grad_entropies = grads
        entropies, statistics, logits, ref_logits, kept, *tensors = ctx.saved_tensors
        args = [c if t is None else t for t, c in zip(tensors, ctx.constants, strict=True)]
        wanted = [ctx.needs_input_grad[i] for i in _DIFFERENTIABLE]
        found = torch.ops.fusedrl.linear_exact_kl_backward(
            grad_kl.contiguous(),
            grad_entropies.contiguous() if ctx.with_entropies else None,
            *args,
            *(entropies, statistics, logits, ref_logits, kept),
            *wanted,
            rounds_grads=_rounding.rounds_grads(args[0], grad_kl),
        )
        results: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for i, grad, want in zip(_DIFFERENTIABLE, found, wanted, strict=True):
            results[i] = grad if want else None
        return tuple(results)


def _fake(hidden: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, ...]:
    *_, entropies, _, most_bytes = options
    dtypes = (torch.float32, torch.float32, torch.int64)
    stored = (_stored.fake(weight, most_bytes, dtype) for dtype in dtypes)
    return *fake_results(hidden, entropies), *stored


def _fake_backward(
    grad_kl: Tensor,
    grad_entropies: Tensor | None,
    *args: Any,
    rounds_grads: Tensor | None = None,
) -> tuple[Tensor, ...]:
    like = [args[i] for i in _DIFFERENTIABLE]
    return tuple(
        x.new_empty(x.shape) if want else args[0].new_empty((0,))
        for x, want in zip(like, args[-6:], strict=True)
    )


_dispatch.register_fakes({"linear_exact_kl": _fake, "linear_exact_kl_backward": _fake_backward})
