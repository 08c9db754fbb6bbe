"""Log-probability of each token from hidden states: the head's logits never exist as a whole."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fusedrl.ops import _dispatch, _rows
from fusedrl.ops.linear_token_log_probs import reference
from fusedrl.ops.linear_token_log_probs.shards import VocabPart, gathered
from fusedrl.ops.token_log_probs import TokenLogProbs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["VocabPart", "linear_token_log_probs"]


def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    vocab_offset: int | None = None,
    group: ProcessGroup | None = None,
    batch_invariant: bool = False,
    impl: str = "auto",
) -> Tensor | TokenLogProbs | VocabPart:
    r"""Log-probability of each token under a softmax over a linear head's logits.

    With ``x = scale * (hidden @ weight.T + bias)``, ``x = softcap * tanh(x / softcap)`` where a
    softcap is given, and ``z = x / temperature``, it is :math:`z_{y} - \log\sum_v e^{z_v}`.
    Only the kept rows are multiplied. Logits exist a tile at a time, in float32: 4 MiB on the CPU
    (beside float32 copies of the kept hidden states and of the tile's weights), at most 512 MiB on
    CUDA, or none (Triton). The backward pass computes them again; it sums every gradient in float32
    and rounds it once. On CUDA, a mask or a shift makes the host wait for the number of kept rows.

    Args:
        hidden: ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``; float32, bfloat16
            or float16 (float64 runs through the reference).
        weight: ``[V, H]`` of the dtype of ``hidden``. Frozen or tied weights need nothing special:
            what requires no grad costs no gradient.
        tokens: integer class of each token, ``[N]``, ``[B, T]`` or jagged; values in ``[0, V)``
            wherever they are read.
        mask: bool, shaped like ``tokens``; ``None`` keeps all. A dropped token has log-prob exactly
            0, and neither its hidden state nor its value are read.
        bias: ``[V]`` of the dtype of ``weight``.
        softcap: positive bound of the logits (Gemma 2's ``final_logit_softcapping``).
        scale: positive factor of the logits (Cohere's ``logit_scale``, 1 over Granite's
            ``logits_scaling``).
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads row *i - 1* of its own sequence, as causal models predict; the first
            token of every sequence has log-prob 0. Packed hidden states then need ``offsets``.
        temperature: positive divisor of the logits; a 0-dim tensor varies it under
            ``torch.compile`` without a recompile. No gradient flows to it.
        entropy: also return the entropy :math:`-\sum_v p_v \log p_v` of each kept row, with
            gradient.
        vocab_offset: ``weight`` and ``bias`` are a shard of a larger vocabulary that starts at this
            class; ``tokens`` still count in the whole. A token in no shard gets ``-inf``.
        group: the process group whose ranks hold the other shards; every rank passes the same
            hidden states and gets the whole answer and the whole gradient of them. Without it, a
            ``vocab_offset`` answers with a :class:`VocabPart`, which does not differentiate.
        batch_invariant: rows are multiplied in blocks of a fixed size, so that a row's bits do not
            depend on the batch around it; slower where blocks are not full.
        impl: ``"auto"``, ``"cpu"``, ``"cuda"``, ``"triton"`` or ``"reference"``.

    Returns:
        float32 log-probs shaped like ``tokens``, :class:`TokenLogProbs` with ``entropy=True``, or
        a :class:`VocabPart`.

    Raises:
        TypeError: a mask that is not bool, hidden states that are not floating point.
        ValueError: shapes, dtypes, devices, offsets or an ``impl`` that do not fit.
        RuntimeError: a kept token outside ``[0, V)`` (CPU; a device-side assert on CUDA).

    Example:
        >>> import torch
        >>> from fusedrl import linear_token_log_probs, token_log_probs
        >>> _ = torch.manual_seed(0)
        >>> hidden, weight = torch.randn(2, 5, 8), torch.randn(100, 8)
        >>> tokens = torch.randint(0, 100, (2, 5))
        >>> log_probs = linear_token_log_probs(hidden, weight, tokens, shift=True)
        >>> from_logits = token_log_probs(hidden @ weight.T, tokens, shift=True)
        >>> torch.allclose(log_probs, from_logits, atol=1e-5)
        True
    """
    tensors = {"hidden": hidden, "weight": weight, "tokens": tokens, "mask": mask, "bias": bias}
    for name, value in tensors.items():
        _dispatch.check_tensor(name, value, optional=name in ("mask", "bias"))
    factor = _positive("scale", scale, 1.0)
    cap = _positive("softcap", softcap, 0.0)
    if hidden.is_nested:
        return _rows.over_jagged(
            lambda values, companions, own: linear_token_log_probs(
                values["hidden"],
                weight,
                companions["tokens"],
                companions["mask"],
                bias=bias,
                softcap=softcap,
                scale=scale,
                offsets=own,
                shift=shift,
                temperature=temperature,
                entropy=entropy,
                vocab_offset=vocab_offset,
                group=group,
                batch_invariant=batch_invariant,
                impl=impl,
            ),
            {"hidden": hidden},
            {"tokens": tokens, "mask": mask},
            offsets,
        )
    hidden, weight, bias = _autocast(hidden, weight, bias)
    _rows.check("hidden", hidden, tokens, mask, offsets, shift, temperature)
    _check_head(hidden, weight, bias)
    if group is not None and vocab_offset is None:
        raise ValueError("vocab_offset: expected the first class of this rank's shard, got None")
    chosen = _dispatch.choose(
        impl,
        "linear_token_log_probs",
        hidden.device,
        hidden.dtype,
        _dispatch.KERNEL_DTYPES,
        triton=True,
    )
    if batch_invariant and chosen == "reference":
        raise ValueError(
            "batch_invariant: expected False with the reference implementation, got True"
        )
    temperature = _dispatch.scalar_tensor("temperature", temperature)
    if chosen == "reference":
        if vocab_offset is not None:
            raise ValueError("vocab_offset: expected None with the reference implementation")
        log_probs, row_entropy = reference.linear_token_log_probs(
            *(hidden, weight, bias, tokens, mask, offsets, shift, temperature, factor, cap, entropy)
        )
    else:
        args = (
            *(_rows.unit_stride(hidden), _rows.unit_stride(weight)),
            None if bias is None else bias.contiguous(),
            tokens.to(torch.int64).contiguous(),
            None if mask is None else mask.contiguous(),
            None if offsets is None else offsets.to(torch.int64).contiguous(),
            *(shift, temperature, factor, cap, entropy, vocab_offset, batch_invariant),
        )
        needs_grad = _dispatch.needs_grad(hidden=hidden, weight=weight, bias=bias)
        if vocab_offset is not None and group is None:
            if needs_grad:
                raise ValueError(
                    "group: expected the process group of the shards, as a VocabPart does not "
                    "differentiate, got None; pass it, or call under torch.no_grad()"
                )
            return VocabPart(_OPS[chosen](*args), temperature, entropy)
        if needs_grad:
            log_probs, row_entropy = _Autograd.apply(chosen, group, *args)
        else:
            log_probs, row_entropy, _ = _forward(chosen, group, args)
    if not entropy:
        return log_probs
    assert row_entropy is not None
    return TokenLogProbs(log_probs, row_entropy)


def _positive(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}: expected a finite number > 0 or None, got {value}")
    return float(value)


def _autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """As ``torch.nn.functional.linear`` takes its arguments under autocast."""
    kind = tensors[0].device.type  # pyright: ignore[reportOptionalMemberAccess]
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(None if x is None or x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def _check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) == 0:
        raise ValueError(
            f"weight: expected [V, {hidden.shape[-1]}] for hidden states {tuple(hidden.shape)}, "
            f"got {tuple(weight.shape)}"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{name}: expected {hidden.dtype} like hidden, got {tensor.dtype}; convert one "
                "of them with .to()"
            )
        _dispatch.check_device(name, tensor, hidden.device)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias: expected shape ({len(weight)},), got {tuple(bias.shape)}")


def _triton(*args: Any) -> Tensor:
    from fusedrl.ops.linear_token_log_probs import triton

    return triton.linear_token_log_probs(*args)


# Statistics [..., 4] of every token's row in the weights' classes: max, sum, dot, target.
_OPS = {
    "cpu": lambda *args: torch.ops.fusedrl.linear_token_log_probs(*args),
    "cuda": lambda *args: torch.ops.fusedrl.linear_token_log_probs(*args),
    "triton": _triton,
}


def _forward(chosen: str, group: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    *_, temperature, _, _, entropy, _, _ = args
    parts = _OPS[chosen](*args)[None]
    if group is not None:
        parts = gathered(parts, group)
    return torch.ops.fusedrl.linear_token_log_probs_finish(parts, temperature, entropy)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: str, group: Any, *args: Any) -> tuple[Tensor, Tensor]:
        hidden, weight, bias, tokens, mask, offsets, shift, temperature, *options = args
        scale, softcap, entropy, vocab_offset, batch_invariant = options
        log_probs, row_entropy, normalizers = _forward(chosen, group, args)
        ctx.save_for_backward(
            *(hidden, weight, bias, tokens, mask, offsets, temperature),
            *(log_probs, row_entropy, normalizers),
        )
        ctx.options = (group, shift, scale, softcap, entropy, vocab_offset, batch_invariant)
        if not entropy:
            ctx.mark_non_differentiable(row_entropy)
        return log_probs, row_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_probs, grad_entropy = grads
        hidden, weight, bias, tokens, mask, offsets, temperature, *results = ctx.saved_tensors
        group, shift, scale, softcap, entropy, vocab_offset, batch_invariant = ctx.options
        _, _, of_hidden, of_weight, of_bias, *_ = ctx.needs_input_grad
        of_head = torch.ops.fusedrl.linear_token_log_probs_backward(
            grad_log_probs.contiguous(),
            grad_entropy.contiguous() if entropy else None,
            *(hidden, weight, bias, tokens, mask, offsets, shift, temperature, scale, softcap),
            *(*results, vocab_offset, batch_invariant, of_hidden, of_weight, of_bias),
        )
        if group is not None and of_hidden:
            torch.distributed.all_reduce(of_head[0], group=group)
        wanted = (of_hidden, of_weight, of_bias)
        found = (grad if want else None for grad, want in zip(of_head, wanted, strict=True))
        return None, None, *found, *(None,) * 10


def _fake(hidden: Tensor, weight: Tensor, bias: Any, tokens: Tensor, *options: Any) -> Tensor:
    return hidden.new_empty((*tokens.shape, 4), dtype=torch.float32)


def _fake_finish(
    parts: Tensor, temperature: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = parts.shape[1:-1]
    log_probs, row_entropy, normalizers = (
        parts.new_empty(s) for s in (shape, shape if entropy else (0,), (*shape, 2))
    )
    return log_probs, row_entropy, normalizers


def _fake_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, hidden, weight, bias, *_, of_hidden, of_weight, of_bias = args
    none = hidden.new_empty((0,))
    return (
        hidden.new_empty(hidden.shape) if of_hidden else none,
        weight.new_empty(weight.shape) if of_weight else none,
        bias.new_empty(bias.shape) if of_bias else none,
    )


_dispatch.register_fakes(
    {
        "linear_token_log_probs": _fake,
        "linear_token_log_probs_finish": _fake_finish,
        "linear_token_log_probs_backward": _fake_backward,
    }
)
