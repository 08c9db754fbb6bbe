"""Divergence of each token from a teacher that is known by the log-probs of a few classes.

The student's logits of these classes are gathered; the log-prob of the likeliest one normalises
all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fusedrl.compat.torch import assert_on_device
from fusedrl.ops import _dispatch, _head, _nested, _rows
from fusedrl.ops.exact_kl import chosen_divergence
from fusedrl.ops.exact_kl.reference import divergence_of
from fusedrl.ops.gathered import logits_of_head
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_log_probs import TokenLogProbs, token_log_probs
from fusedrl.ops.token_log_probs.reference import rows_of_tokens

TAILS = ("bucket", "renormalize")
LEAST_REST = 1e-6  # smaller remainders are lost to the rounding of float32 log-probs
MOST_SUM = 1.05  # of probabilities whose logs may have been rounded to bfloat16


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
    r"""Divergence of a student from a teacher whose k likeliest classes are known, in nats.

    In KL(p || q), a class with p = 0 adds 0, and one with only q = 0 makes the KL +inf. The teacher
    gets no gradient, and neither does a logit of -inf if the KL is finite.

    Args:
        logits: the student's, ``[N, V]`` packed, ``[B, T, V]`` padded, or nested; floating point.
        ids: integer ``[..., k]``, the classes of the teacher's log-probs for each token, in any
            order, each at most once. Negative ids are ignored.
        teacher_log_probs: shaped like ``ids``, normalised over the whole vocabulary, as an
            inference engine returns them. The temperature is not applied to them.
        mask: bool, one per token. A dropped token has divergence 0 and is not read.
        direction: ``"reverse"`` KL(student || teacher), ``"forward"`` KL(teacher || student), or
            ``"jensen_shannon"`` :math:`(1 - \beta) KL(s \| m) + \beta KL(t \| m)` with
            :math:`m = (1 - \beta) s + \beta t`.
        beta: the teacher's share of that mixture, 0 (the forward KL, as in GKD), 1 (the reverse KL)
            or from 1e-30 to below 1; ``None`` is 1/2.
        tail: ``"bucket"`` adds one class with the remaining probability of each side, at least
            1e-6; ``"renormalize"`` makes the probabilities of the ids sum to 1.
        offsets: int64 ``[B + 1]``, where each sequence of packed rows starts and ends.
        shift: token *i* reads logits row *i - 1* of its sequence, as causal models predict, and row
            *i* of ``ids``; the first token of every sequence has divergence 0.
        temperature: positive divisor of the logits; a 0-dim tensor may vary without a recompile.

    Returns:
        float32 (float64 for float64), one per token in the form of the logits.

    Raises:
        TypeError, ValueError: options, shapes, devices and offsets that do not fit.
        RuntimeError: a kept token has an id twice, or its teacher's probabilities sum to more than
            1.05 (a device-side assert on CUDA).

    Example:
        >>> import torch
        >>> from fusedrl import top_k_kl
        >>> logits = torch.zeros(1, 4)  # 1/4 each
        >>> ids, teacher = torch.tensor([[2, 0]]), torch.tensor([[0.5, 0.25]]).log()
        >>> top_k_kl(logits, ids, teacher)  # 1/4, 1/4 and 1/2 against 1/2, 1/4 and 1/4
        tensor([0.1733])
    """
    batch = _nested.pack("logits", logits, offsets)
    logits = batch.values

    def gathered(rows: Tensor, ids: Tensor) -> Tensor:
        at = (place[:, None] for place in _rows.index_of(rows, logits))
        return logits[(*at, ids.flatten(0, -2).clamp(min=0))].view(ids.shape)

    options = {"offsets": batch.offsets, "shift": shift, "temperature": temperature}
    log_probs = partial(token_log_probs, logits, **options)
    return _divergence(
        *(batch, logits.shape[-1], ids, teacher_log_probs, mask, direction, beta, tail, shift),
        *(temperature, gathered, log_probs),
    )


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

    Arguments that are not listed, results and errors are those of :func:`top_k_kl`.

    Args:
        hidden: the student's, ``[N, H]`` packed, ``[B, T, H]`` padded, or nested.
        weight: ``[V, H]`` of the dtype of ``hidden``.
        bias: ``[V]``, added to ``hidden @ weight.T``.
        scale: positive factor of the logits.
        softcap: positive bound of the logits, by ``softcap * tanh(logits / softcap)``.

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
    batch = _nested.pack("hidden", hidden, offsets)
    head = _head.prepare("", batch.values, weight, bias, scale, softcap)

    def gathered(rows: Tensor, ids: Tensor) -> Tensor:
        kept = (ids >= 0).flatten().nonzero().squeeze(-1)  # skips prompts
        found = logits_of_head(head, rows[kept // ids.shape[-1]], ids.flatten()[kept])
        return found.new_zeros(ids.numel()).index_put((kept,), found).view(ids.shape)

    options = {"offsets": batch.offsets, "shift": shift, "temperature": temperature}
    options |= {"bias": head.bias, "softcap": softcap, "scale": scale}
    log_probs = partial(linear_token_log_probs, head.hidden, head.weight, **options)
    return _divergence(
        *(batch, len(head.weight), ids, teacher_log_probs, mask, direction, beta, tail, shift),
        *(temperature, gathered, log_probs),
    )


def _divergence(
    batch: _nested.Batch,
    classes: int,
    ids: Tensor,
    teacher: Tensor,
    mask: Tensor | None,
    direction: str,
    beta: float | None,
    tail: str,
    shift: bool,
    temperature: float | Tensor,
    gathered: Callable[[Tensor, Tensor], Tensor],
    log_probs: Callable[[Tensor, Tensor], TokenLogProbs],
) -> Tensor:
    """The divergence, from functions for a student's logits of ids and log-probs of one class."""
    _dispatch.check_flags(shift=shift)
    chosen = chosen_divergence(direction, beta)
    _dispatch.check_choice("tail", tail, TAILS)
    rows, like = batch.values, f" for {batch.name}"
    _rows.check_rows(batch.name, rows, batch.offsets, shift)
    ids, mask = batch.companion("ids", ids), batch.optional("mask", mask)
    teacher = batch.companion("teacher_log_probs", teacher)
    shape = torch.Size((*rows.shape[:-1], ids.shape[-1]))
    _dispatch.check_same("ids", ids, shape, rows.device, like, rows, "give k classes for each row")
    like_ids = (" like ids", None, "give one log-prob for each id")
    _dispatch.check_same("teacher_log_probs", teacher, shape, rows.device, *like_ids)
    _dispatch.check_mask(mask, rows.shape[:-1], rows.device, like, rows)
    read, present = rows_of_tokens(rows[..., 0], batch.offsets, shift)
    keep = present.view(rows.shape[:-1])
    known = (ids >= 0) & (keep if mask is None else keep & mask)[..., None]
    ids = ids.long().masked_fill(~known, -1)
    in_order = ids.sort(-1).values
    twice = (in_order.diff(dim=-1) == 0) & (in_order[..., 1:] >= 0)
    assert_on_device(
        ~twice.any(),
        "ids: expected every class at most once a token, got one twice; set one of them to -1",
    )
    teacher = teacher.detach().to(_dispatch.result_dtype(rows)).masked_fill(~known, -torch.inf)
    total = teacher.double().exp().sum(-1, keepdim=True)  # float64, as 1 - total cancels
    complete = known.sum(-1, keepdim=True) == classes
    assert_on_device(
        ~(total > MOST_SUM).any(),
        "teacher_log_probs: expected probabilities that sum to 1 over the whole vocabulary, got a "
        "larger sum; apply log_softmax, and pass no class twice",
    )
    z, keep = gathered(read, ids).to(teacher), known.any(-1)
    z = z.masked_fill(~known | (z == -torch.inf), -torch.inf)  # no gradient reaches a banned class
    z = z / _dispatch.scalar_tensor("temperature", temperature, z.device).to(z)
    largest, place = z.max(-1, keepdim=True)
    likeliest = ids.gather(-1, place).squeeze(-1).clamp(min=0)
    # If all classes are impossible, subtracting -inf would give NaN.
    relative = z - largest.masked_fill(largest == -torch.inf, 0)
    student = relative + log_probs(likeliest, keep).log_probs[..., None]
    if tail == "renormalize":
        student, teacher = (
            torch.log_softmax(x.masked_fill(~keep[..., None], 0), -1) for x in (student, teacher)
        )
    else:
        rests = 1 - student.double().exp().sum(-1, keepdim=True), 1 - total
        student, teacher = (
            torch.cat(
                (x, rest.to(x).clamp(min=LEAST_REST).log().masked_fill(complete, -torch.inf)), -1
            )
            for x, rest in zip((student, teacher), rests, strict=True)
        )
    p, q = (teacher, student) if chosen.swapped else (student, teacher)
    return batch.result(divergence_of(p, q, chosen.beta).masked_fill(~keep, 0))
