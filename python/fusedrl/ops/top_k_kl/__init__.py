"""Divergence from a teacher of whom the log-probs of a few classes are known, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _rows, _saved_tensors
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._sequence_parts import accepts_parts
from fusedrl.ops.top_k_kl import reference, teachers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["top_k_kl"]


@accepts_parts("ids", "teacher_log_probs", "mask")
@accepts_nested("ids", "teacher_log_probs")
def top_k_kl(
    logits: Tensor,
    ids: Tensor,
    teacher_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    direction: str = "reverse",
    beta: float | None = None,
    tail: str = "bucket",
    offsets: Tensor | None = None,
    shift: bool = False,
    sequence_group: ProcessGroup | None = None,
    temperature: float | Tensor = 1.0,
    impl: str = "auto",
) -> Tensor:
    r"""Divergence of a student from a teacher whose k likeliest classes are known.

    Inference engines answer with the log-probs of the k likeliest classes of a token. With the
    student :math:`s = \mathrm{softmax}(\text{logits} / \text{temperature})` and the teacher
    :math:`t`, both over those classes and the rest, in nats:
    ``"reverse"`` :math:`KL(s \| t) = \sum_j s_j (\log s_j - \log t_j)`,
    ``"forward"`` :math:`KL(t \| s)`,
    ``"jensen_shannon"`` :math:`(1 - \beta) KL(s \| m) + \beta KL(t \| m)` with
    :math:`m = (1 - \beta) s + \beta t`. Every kept row of logits is read once and nothing of its
    size is kept. Gradients reach the logits alone.

    The teacher's rest is 1 less the sum of its probabilities, but at least 1e-6: float32 log-probs
    do not tell it better, and may sum to a little more than 1. There is no rest where the student
    has nothing outside of the ids (they are all classes, or all others have a logit of -inf) and
    the teacher has nothing but rounding there.

    A class adds 0 where the distribution that weighs it gives it probability 0 (or underflow). It
    makes a KL +inf where only the other distribution does. The gradient of a -inf logit is 0; other
    gradients of an infinite KL are not finite.

    Args:
        logits: the student's, ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``;
            float32, bfloat16 or float16 (float64 runs through the reference). Dimension V must have
            stride 1, otherwise it is copied; other strides are free.
        ids: integer classes that the teacher's log-probs are of, ``[N, k]``, ``[B, T, k]`` or
            jagged ``[B, j, k]``, in any order, every class at most once a token. An id below 0 is
            no class: its entry is not read, so that tokens may have fewer than k.
        teacher_log_probs: floating point, of the shape of ``ids``, normalised over the whole
            vocabulary, as the engine gives them: the temperature does not divide them.
        mask: bool ``[N]``, ``[B, T]`` or jagged; ``None`` keeps all. A dropped token has divergence
            exactly 0, and neither its logits nor its ids and log-probs are read.
        direction: ``"reverse"``, ``"forward"`` or ``"jensen_shannon"``.
        beta: the teacher's share of the mixture, for ``"jensen_shannon"`` alone: 0 (the forward KL,
            as in GKD), 1 (the reverse KL) or from 1e-30 to below 1. ``None`` is 1/2.
        tail: ``"bucket"`` compares the rest of the student's probability with the rest of the
            teacher's, as one class more; ``"renormalize"`` makes each side's probabilities of the
            ids sum to 1 and leaves out the rest. A token without ids then has divergence 0.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads logits row *i - 1* of its own sequence, as causal models predict, and
            its own ids and log-probs; the first token of every sequence has divergence 0. Packed
            logits then need ``offsets``. Without it token *i* reads logits row *i*.
        sequence_group: the process group over whose ranks sequences are split into contiguous
            parts, in the order of the ranks (context parallelism). With ``shift`` the first token
            of a part reads the last row of the rank before. Every rank calls, and differentiates.
            ``offsets`` are those of all ranks' tokens, ``k`` is the same on every rank; nested
            input is refused.
        temperature: positive divisor of the logits. Pass a 0-dim tensor to vary it under
            ``torch.compile`` without a recompile. No gradient flows to it.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        float32 ``[N]``, ``[B, T]`` or jagged like the logits; below 0 by rounding alone. A row of
        -inf only, a NaN or a +inf gives NaN, and so do ids of -inf only that are renormalised.

    Raises:
        TypeError: a mask that is not bool, ids that are no integers, logits or log-probs that are
            not floating point.
        ValueError: an unknown direction or tail, a beta out of range or without
            ``"jensen_shannon"``, or shapes, dtypes, devices and offsets that do not fit.
        RuntimeError: a kept token with an id of V or more, with the same id twice, or whose
            teacher's probabilities sum to more than 1.05, or with ``"bucket"`` to less than 0.95
            though all classes are known (a device-side assert on CUDA).

    Example:
        >>> import torch
        >>> from fusedrl import top_k_kl
        >>> logits = torch.zeros(1, 4)  # 1/4 each
        >>> ids, teacher = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]]).log()
        >>> top_k_kl(logits, ids, teacher)  # 1/4, 1/4 and 1/2 against 1/2, 1/4 and 1/4
        tensor([0.1733])
        >>> # With shift, of a model's own output, a row is about the token after it:
        >>> chat = [x.expand(1, 2, -1) for x in (logits, ids, teacher)]
        >>> top_k_kl(*chat, shift=True)
        tensor([[0.0000, 0.1733]])
        >>> top_k_kl(logits, ids, teacher, tail="renormalize")  # 1/2, 1/2 against 2/3, 1/3
        tensor([0.0589])
    """
    _dispatch.check_tensor("logits", logits, _dispatch.DENSE, _dispatch.NESTED)
    _rows.check_rows("logits", logits, offsets, shift)
    teacher = teachers.prepare(
        *(logits, "logits", logits.shape[-1], ids, teacher_log_probs, mask, offsets, shift),
        *(direction, beta, tail),
    )
    chosen = _dispatch.choose(impl, "top_k_kl", logits.device, logits.dtype)
    divisor = _dispatch.temperature_tensor(temperature, logits.device, chosen)
    if chosen == "reference":
        log_probs = reference.log_probs(logits, ids, mask, offsets, shift, divisor)
    else:
        batch = (
            teacher.ids,
            None if mask is None else mask.contiguous(),
            None if offsets is None else offsets.to(torch.int64).contiguous(),
        )
        args = (_rows.with_unit_stride(logits), *batch, shift, divisor)
        if _autograd.needs_grad(logits=logits, temperature=divisor):
            log_probs = _autograd.apply(_Autograd, *args)
        else:
            log_probs = torch.ops.fusedrl.top_k_kl_log_probs(*args)[0]
    return teachers.divergence(log_probs, teacher)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        logits, ids, mask, offsets, shift, temperature = args
        log_probs, normalizers = torch.ops.fusedrl.top_k_kl_log_probs(*args)
        _saved_tensors.save(ctx, logits, ids, mask, offsets, temperature, log_probs, normalizers)
        ctx.shift = shift
        return log_probs

    @staticmethod
    @_autograd.first_derivative_only("top_k_kl")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, mask, offsets, temperature, log_probs, normalizers = _saved_tensors.saved(ctx)
        grad = torch.ops.fusedrl.top_k_kl_log_probs_backward(
            *(grads[0].contiguous(), logits, ids, mask, offsets, ctx.shift, temperature),
            *(log_probs, normalizers),
        )
        return grad, None, None, None, None, None


def _fake(logits: Tensor, ids: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    rows, k = logits.shape[:-1], ids.shape[-1]
    dtype = _dispatch.result_dtype(logits)
    return logits.new_empty((*rows, k + 1), dtype=dtype), logits.new_empty((*rows, 2), dtype=dtype)


def _fake_backward(grad_log_probs: Tensor, logits: Tensor, *options: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_dispatch.register_fakes(
    {"top_k_kl_log_probs": _fake, "top_k_kl_log_probs_backward": _fake_backward}
)
