"""Divergence from a teacher of whom the log-probs of a few classes are known, token by token.

The student's logits of these classes are gathered, and one log-prob a token normalises them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _head, _nested, _rows
from fusedrl.ops.gathered import logits_of_head
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_log_probs import token_log_probs
from fusedrl.ops.top_k_kl import teachers
from fusedrl.ops.top_k_kl.teachers import Teacher

__all__ = ["linear_top_k_kl", "top_k_kl"]


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
    temperature: float | Tensor = 1.0,
) -> Tensor:
    r"""Divergence of a student from a teacher whose k likeliest classes are known.

    Inference engines answer with the log-probs of the k likeliest classes of a token. With the
    student :math:`s = \mathrm{softmax}(\text{logits} / \text{temperature})` and the teacher
    :math:`t`, both over those classes and the rest, in nats:
    ``"reverse"`` :math:`KL(s \| t) = \sum_j s_j (\log s_j - \log t_j)`,
    ``"forward"`` :math:`KL(t \| s)`,
    ``"jensen_shannon"`` :math:`(1 - \beta) KL(s \| m) + \beta KL(t \| m)` with
    :math:`m = (1 - \beta) s + \beta t`. Gradients reach the logits alone.

    The rest of either side is 1 less the sum of its probabilities, but at least 1e-6: float32
    log-probs do not tell it better, and may sum to a little more than 1. There is none where the
    ids are all classes.

    A class adds 0 where the distribution that weighs it gives it probability 0 (or underflow). It
    makes a KL +inf where only the other distribution does. Of a finite one the gradient of a -inf
    logit is 0; gradients of an infinite one mean nothing.

    Args:
        logits: the student's, ``[N, V]`` packed, ``[B, T, V]`` padded, or jagged ``[B, j, V]``;
            float32, bfloat16 or float16 (float64 too). Dimension V must have
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
        temperature: positive divisor of the logits. Pass a 0-dim tensor to vary it under
            ``torch.compile`` without a recompile. No gradient flows to it.

    Returns:
        float32 ``[N]``, ``[B, T]`` or jagged like the logits; below 0 by rounding alone. A row of
        -inf only, a NaN or a +inf gives NaN to a token with ids, and so do ids of -inf only that
        are renormalised.

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
    _dispatch.check_flags(shift=shift)
    batch = _nested.pack("logits", logits, offsets)
    logits, offsets = batch.values, batch.offsets
    ids, mask = batch.companion("ids", ids), batch.optional("mask", mask)
    teacher_log_probs = batch.companion("teacher_log_probs", teacher_log_probs)
    _rows.check_rows("logits", logits, offsets, shift)
    teacher = teachers.prepare(
        *(logits, "logits", logits.shape[-1], ids, teacher_log_probs, mask, offsets, shift),
        *(direction, beta, tail),
    )
    at = (place[:, None] for place in _rows.index_of(teacher.rows, logits))
    gathered = logits[(*at, teacher.ids.flatten(0, -2).clamp(min=0))].view(ids.shape)
    likeliest, relative = _normalized(gathered.to(teacher.log_probs), teacher, temperature)
    options = {"offsets": offsets, "shift": shift, "temperature": temperature}
    found = token_log_probs(logits, likeliest, teacher.keep, **options)
    return batch.result(teachers.divergence(relative + found.log_probs[..., None], teacher))


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
    temperature: float | Tensor = 1.0,
) -> Tensor:
    r"""The divergence of :func:`top_k_kl` from hidden states and a linear head, without all logits.

    The student's logits are ``scale * (hidden @ weight.T + bias)``, capped to
    ``softcap * tanh(logits / softcap)`` where a softcap is given. Those of the ids come from their
    rows of the weight, and one :func:`linear_token_log_probs` normalises them. Gradients reach
    ``hidden``, ``weight`` and ``bias``, each only where it is required.

    Args:
        hidden: the student's, ``[N, H]`` packed, ``[B, T, H]`` padded, or jagged ``[B, j, H]``;
            float32, bfloat16 or float16 (float64 too).
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
        temperature: positive divisor of the logits. No gradient flows to it.

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
    _dispatch.check_flags(shift=shift)
    batch = _nested.pack("hidden", hidden, offsets)
    hidden, offsets = batch.values, batch.offsets
    ids, mask = batch.companion("ids", ids), batch.optional("mask", mask)
    teacher_log_probs = batch.companion("teacher_log_probs", teacher_log_probs)
    head = _head.prepare("", hidden, weight, bias, scale, softcap)
    _rows.check_rows("hidden", head.hidden, offsets, shift)
    teacher = teachers.prepare(
        *(head.hidden, "hidden", len(head.weight), ids, teacher_log_probs),
        *(mask, offsets, shift, direction, beta, tail),
    )
    # Prompts are not gathered.
    kept = (teacher.ids >= 0).flatten().nonzero().squeeze(-1)
    of_kept = logits_of_head(head, teacher.rows[kept // ids.shape[-1]], teacher.ids.flatten()[kept])
    gathered = of_kept.new_zeros(ids.numel()).index_put((kept,), of_kept).view(ids.shape)
    likeliest, relative = _normalized(gathered, teacher, temperature)
    found = linear_token_log_probs(
        *(head.hidden, head.weight, likeliest, teacher.keep),
        bias=head.bias,
        softcap=softcap,
        scale=scale,
        offsets=offsets,
        shift=shift,
        temperature=temperature,
    )
    return batch.result(teachers.divergence(relative + found.log_probs[..., None], teacher))


def _normalized(
    logits: Tensor, teacher: Teacher, temperature: float | Tensor
) -> tuple[Tensor, Tensor]:
    """The likeliest id of each token, and the log-probs ``[..., k]`` of all less that id's."""
    absent = (teacher.ids < 0) | (logits == -torch.inf)  # no gradient reaches a banned class
    divisor = _dispatch.scalar_tensor("temperature", temperature, logits.device)
    z = logits.masked_fill(absent, -torch.inf) / divisor.to(logits)
    largest, place = z.max(-1, keepdim=True)
    # Of classes that are all impossible, none is subtracted.
    relative = z - largest.masked_fill(largest == -torch.inf, 0)
    return teacher.ids.gather(-1, place).squeeze(-1).clamp(min=0), relative
