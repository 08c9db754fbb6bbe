"""Truncated sampling: the classes that a sampler keeps, and log-probs over only these.

The kept classes of all tokens, their *support*, are a sparse matrix with one row per token, in CSR
format (ids and offsets).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _head, _rows
from fusedrl.ops.gathered import logits_of_head
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_log_probs.reference import rows_of_tokens

_CHUNK = 1 << 23  # logits that are sorted at a time


def sampling_support(
    logits: Tensor,
    mask: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
) -> tuple[Tensor, Tensor]:
    """The classes that ``generate`` of transformers can sample for each token, given its logits.

    Logits that differ, be it by rounding, may give another class at the threshold.

    Args:
        logits: ``[N, V]`` packed or ``[B, T, V]`` padded, floating point, before the temperature.
        mask: bool, one per token: the sampled tokens. Dropped tokens get an empty row.
        temperature: of the sampler, from 1e-30 to 1e30.
        top_k: keep this many of the likeliest classes, and ties of the last; ``None`` for all.
        top_p: keep the smallest set of classes with this total probability; ``None`` for all.
        min_p: keep classes with at least this fraction of the largest probability.
        offsets: int64 ``[B + 1]``, where each sequence of packed logits starts and ends.
        shift: token *i* was sampled from row *i - 1* of its sequence, and the first from no row.

    Returns:
        int64 ids ``[S]``, ascending within a token, and int64 offsets ``[N + 1]`` over all tokens,
        for :func:`support_log_probs`. A row is empty if all classes are kept.

    Raises:
        TypeError, ValueError: shapes that do not fit, or a limit out of range.

    Example:
        >>> import torch
        >>> from fusedrl import sampling_support
        >>> logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]).log()
        >>> sampling_support(logits, top_p=0.7)
        (tensor([0, 1, 0, 1]), tensor([0, 2, 4]))
    """
    _dispatch.check_flags(shift=shift)
    _rows.check_rows("logits", logits, offsets, shift)
    _dispatch.check_mask(mask, logits.shape[:-1], logits.device, " like the rows of logits")
    divisor = _dispatch.temperature_tensor(temperature, logits.device, "reference").item()
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if value is not None and not 0 <= value <= 1:
            raise ValueError(
                f"{name}: expected from 0 to 1, got {value}; leave it out for no limit"
            )
    rows, keep = rows_of_tokens(logits[..., 0], offsets, shift)
    kept = (keep if mask is None else keep & mask.flatten()).nonzero().squeeze(-1)
    counts, found = torch.zeros_like(rows), [rows.new_empty(0)]
    for part in kept.split(max(_CHUNK // logits.shape[-1], 1)):
        scores = logits.detach()[_rows.index_of(rows[part], logits)]
        scores = scores.to(_dispatch.result_dtype(logits)) / divisor
        sampled = _sampled(scores, top_k, top_p, min_p)
        sampled &= ~sampled.all(-1, keepdim=True)  # an empty row stands for all classes
        counts[part] = sampled.sum(-1)
        found.append(sampled.nonzero()[:, 1])
    return torch.cat(found), torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _sampled(scores: Tensor, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    """The classes that each row of scores keeps; overwrites ``scores``."""
    if top_k is not None:
        least = scores.topk(min(top_k, scores.shape[-1])).values[:, -1:]
        scores.masked_fill_(scores < least, -torch.inf)
    if top_p is not None and top_p < 1:
        in_order, classes = scores.sort()
        out = in_order.softmax(-1).cumsum(-1) <= 1 - top_p
        out[:, -1] = False
        scores.masked_fill_(torch.empty_like(out).scatter_(1, classes, out), -torch.inf)
    if min_p is not None:
        p = scores.softmax(-1)
        scores.masked_fill_(p < min_p * p.amax(-1, keepdim=True), -torch.inf)
    return scores != -torch.inf  # keeps NaN, which makes the row NaN, as without a support


def support_log_probs(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    support: tuple[Tensor, Tensor],
    mask: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    offsets: Tensor | None = None,
    shift: bool = False,
    temperature: float | Tensor = 1.0,
) -> Tensor:
    """Log-prob of each token under a softmax over its support; no other logits are computed.

    Arguments that are not listed, and their errors, are those of :func:`linear_token_log_probs`.
    ``hidden``, ``weight`` and ``bias`` get gradients.

    Args:
        support: integer ids ``[S]`` and offsets ``[N + 1]`` over all tokens, as
            :func:`sampling_support` returns them; an empty row stands for all classes.

    Returns:
        float32 log-probs shaped like ``tokens``; 0 for a dropped token, whose support is not read.

    Raises:
        ValueError: ids of a kept token that are negative, not ascending, or lack the token.

    Example:
        >>> import torch
        >>> from fusedrl import sampling_support, support_log_probs
        >>> hidden, weight = torch.ones(2, 1), torch.tensor([[0.6], [0.3], [0.1]]).log()
        >>> support = sampling_support(hidden @ weight.T, top_p=0.7)
        >>> support_log_probs(hidden, weight, torch.tensor([0, 1]), support).exp()
        tensor([0.6667, 0.3333])
    """
    _dispatch.check_flags(shift=shift)
    head = _head.prepare("", hidden, weight, bias, scale, softcap)
    _rows.check_rows("hidden", head.hidden, offsets, shift)
    _rows.check_tokens(tokens, "hidden", head.hidden)
    _dispatch.check_mask(mask, tokens.shape, head.hidden.device)
    divisor = _dispatch.temperature_tensor(temperature, head.hidden.device, "reference")
    rows, keep = rows_of_tokens(tokens, offsets, shift)
    keep = keep if mask is None else keep & mask.flatten()
    ids, counts = support[0].long(), support[1].long().diff()
    listed = keep & (counts > 0)
    entry = torch.repeat_interleave(counts)  # the token of each id
    ids, entry = ids[listed[entry]], entry[listed[entry]]
    wrong, own = ids < 0, ids == tokens.flatten()[entry]
    wrong[1:] |= (ids.diff() <= 0) & (entry.diff() == 0)
    without = listed.index_fill(0, entry[own], False).nonzero()[:, 0]
    refused = torch.cat((entry[wrong], without))
    if len(refused):
        raise ValueError(
            "support: expected ascending ids >= 0 that include the token, got other ids for token "
            f"{int(refused[0])}; compute the support from the logits that it was sampled from"
        )
    z = logits_of_head(head, rows[entry], ids)
    z = z / divisor.to(z)
    zeros = z.new_zeros(len(rows))
    largest = zeros.scatter_reduce(0, entry, z.detach(), "amax", include_self=False)
    total = zeros.index_add(0, entry, (z - largest[entry]).exp())
    chosen = zeros.index_add(0, entry[own], z[own])
    log_sum = largest + torch.where(listed, total, 1).log()
    log_probs = torch.where(listed, chosen - log_sum, 0).view(tokens.shape)
    whole = (keep & ~listed).view(tokens.shape)
    if bool(whole.any()):
        options = {"offsets": offsets, "shift": shift, "temperature": temperature}
        options |= {"bias": bias, "softcap": softcap, "scale": scale}
        found = linear_token_log_probs(hidden, weight, tokens, whole, **options)
        log_probs = log_probs + found.log_probs
    return log_probs
