"""Log-prob of each token from its logits, in one pass and without a log_softmax."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _nested, _rows
from fusedrl.ops.token_log_probs import reference

__all__ = ["TokenLogProbs", "token_log_probs"]


class TokenLogProbs(NamedTuple):
    """Log-probabilities and entropies of tokens, in nats and float32, shaped like the tokens.

    The entropy is ``None`` unless requested.
    """

    log_probs: Tensor
    entropy: Tensor | None


def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    impl: str = "auto",
) -> TokenLogProbs:
    r"""Log-probability of each token under a softmax over its logits.

    With ``z = logits / temperature``, the log-prob of token y is
    :math:`z_{y} - \log\sum_v e^{z_v}`. The op reads every kept row once, accumulates in float32 and
    stores nothing of the size of the logits. The gradient has the dtype of the logits; the backward
    pass recomputes the softmax.

    Args:
        logits: ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``; float32, bfloat16
            or float16 (float64 runs through the reference). Dimension V must have stride 1,
            otherwise it is copied; other strides are free.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged; in ``[0, V)`` for kept
            tokens.
        mask: bool, shaped like ``tokens``; ``None`` keeps all. A dropped token has log-prob exactly
            0, and neither its logits nor its class is read.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads logits row *i - 1* of its sequence, as causal models predict, instead
            of row *i*; the first token of every sequence has log-prob 0. Packed logits then need
            ``offsets``.
        temperature: divisor of the logits, from 1e-30 to 1e30. A 0-dim tensor, on the CPU or the
            device of the logits, may change under ``torch.compile`` without a recompile. No
            gradient flows to it.
        entropy: also compute the entropy :math:`-\sum_v p_v \log p_v` of each kept row, with
            gradient.
        impl: ``"auto"`` uses the device's compiled kernel, or falls back to plain torch; ``"cpu"``
            and ``"cuda"`` require the kernel, ``"reference"`` uses plain torch.

    Returns:
        :class:`TokenLogProbs`, whose float32 tensors are shaped like ``tokens``, jagged for jagged
        input.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, or that does not fit the
            others.
        RuntimeError: a kept token outside ``[0, V)``; an invalid temperature in a compiled graph or
            on the GPU. On CUDA both are device-side asserts.
        NotImplementedError: forward-mode differentiation, or a gradient under a transform of
            ``torch.func``, without ``impl="reference"``.

    Example:
        >>> import torch
        >>> from fusedrl import token_log_probs
        >>> logits = torch.tensor([[0.0, 0.0], [0.0, 1.0986123]])
        >>> token_log_probs(logits, torch.tensor([0, 1])).log_probs.exp()
        tensor([0.5000, 0.7500])
        >>> # Two packed sequences of one token each: with shift, nothing predicts a first token.
        >>> offsets = torch.tensor([0, 1, 2])
        >>> token_log_probs(logits, torch.tensor([0, 1]), offsets=offsets, shift=True).log_probs
        tensor([0., 0.])
    """
    _dispatch.check_flags(shift=shift, entropy=entropy)
    batch = _nested.pack("logits", logits, offsets, like=tokens)
    logits, offsets = batch.values, batch.offsets
    tokens, mask = batch.companion("tokens", tokens), batch.optional("mask", mask)
    _rows.check_rows("logits", logits, offsets, shift)
    _rows.check_tokens(tokens, "logits", logits)
    _dispatch.check_mask(mask, tokens.shape, logits.device)
    chosen = _dispatch.choose(
        impl, "token_log_probs", logits.device, logits.dtype, _dispatch.KERNEL_DTYPES
    )
    scale = _dispatch.temperature_tensor(temperature, logits.device, chosen)
    if chosen == "reference":
        log_probs, row_entropy = reference.token_log_probs(
            *(logits, tokens, mask, offsets, shift, scale, entropy)
        )
    else:
        logits = _rows.with_unit_stride(logits)
        tokens = tokens.to(torch.int64).contiguous()
        mask = None if mask is None else mask.contiguous()
        offsets = None if offsets is None else offsets.to(torch.int64).contiguous()
        args = (logits, tokens, mask, offsets, shift, scale, entropy)
        if _autograd.needs_grad(logits=logits, temperature=scale):
            log_probs, row_entropy = _autograd.apply(_Autograd, *args)
        else:
            log_probs, row_entropy, _ = torch.ops.fusedrl.token_log_probs(*args)
    return TokenLogProbs(batch.result(log_probs), batch.result(row_entropy) if entropy else None)


def normalizers(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Each row's ``largest`` logit and ``log(sum(exp((logits - largest) / temperature)))``.

    Both are ``[..., 1]``, without a gradient; subtracted from a logit, they give its log-prob.
    """
    rows = _rows.with_unit_stride(logits.detach().reshape(-1, logits.shape[-1]))
    _rows.check_rows("logits", rows, None, False)
    chosen = _dispatch.choose("auto", "token_log_probs", rows.device, rows.dtype)
    scale = _dispatch.temperature_tensor(temperature, rows.device, chosen)
    shape = (*logits.shape[:-1], 1)
    if chosen == "reference":
        largest = rows.amax(-1, keepdim=True).to(_dispatch.result_dtype(rows))
        exponents = (rows - largest) / scale.to(largest)
        return largest.view(shape), exponents.logsumexp(-1).view(shape)
    any_class = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    *_, found = torch.ops.fusedrl.token_log_probs(rows, any_class, None, None, False, scale, False)
    return found[:, 0].view(shape), found[:, 1].view(shape)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        logits, tokens, mask, offsets, shift, temperature, entropy = args
        log_probs, row_entropy, normalizers = torch.ops.fusedrl.token_log_probs(*args)
        ctx.save_for_backward(
            logits, tokens, mask, offsets, temperature, log_probs, row_entropy, normalizers
        )
        ctx.shift = shift
        ctx.entropy = entropy
        if not entropy:
            ctx.mark_non_differentiable(row_entropy)
        return log_probs, row_entropy

    @staticmethod
    @_autograd.first_derivative_only("token_log_probs")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        saved = ctx.saved_tensors
        logits, tokens, mask, offsets, temperature, log_probs, row_entropy, normalizers = saved
        grad = torch.ops.fusedrl.token_log_probs_backward(
            grad_log_probs.contiguous(),
            grad_entropy.contiguous() if ctx.entropy else None,
            logits,
            tokens,
            mask,
            offsets,
            ctx.shift,
            temperature,
            log_probs,
            row_entropy,
            normalizers,
        )
        return grad, None, None, None, None, None, None


def _fake(logits: Tensor, tokens: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_, entropy = options
    shapes = (tokens.shape, tokens.shape if entropy else (0,), (*tokens.shape, 2))
    dtype = _dispatch.result_dtype(logits)
    log_probs, row_entropy, normalizers = (logits.new_empty(s, dtype=dtype) for s in shapes)
    return log_probs, row_entropy, normalizers


def _fake_backward(
    grad_log_probs: Tensor, grad_entropy: Tensor | None, logits: Tensor, *rest: Any
) -> Tensor:
    return logits.new_empty(logits.shape)


_dispatch.register_fakes({"token_log_probs": _fake, "token_log_probs_backward": _fake_backward})
