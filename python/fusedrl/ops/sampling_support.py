"""Truncated sampling: which classes a sampler leaves of a row, and log-probs over these alone.

The classes that are left of all tokens, their *support*, are a sparse matrix of a row a token, in
compressed rows (CSR).
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _head, _rows
from fusedrl.ops.gathered import logits_of_head
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs
from fusedrl.ops.token_log_probs.reference import rows_of_tokens

_CHUNK = 1 << 23  # logits that are sorted at a time
_SUPPORT = "pass what sampling_support returns"


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
    """The classes from which each token was sampled, from the logits that its sampler had.

    It does what ``generate`` of transformers does with the same arguments, in the same order: the
    temperature divides the logits, top-k, top-p and min-p leave out classes, each of what the one
    before left. Ties of the last class of top-k stay. A class with a logit of -inf is out.

    The logits have to be those of the sampling itself (``generate(output_logits=True)``), or of the
    version of the weights that sampled. Other logits, or the same ones with other rounding, may
    leave out another class at the edge. Engines that return the classes that they left need no
    recomputation.

    Args:
        logits: ``[N, V]`` packed or ``[B, T, V]`` padded, before the temperature; floating point.
        mask: bool, shaped like the tokens, ``[N]`` or ``[B, T]``: which of them were sampled. The
            others get an empty row. ``None`` takes all.
        temperature: of the sampler, from 1e-30 to 1e30.
        top_k: how many classes stay, at least 1; ``None`` for all.
        top_p: the fewest likeliest classes with this probability stay, above 0 and up to 1;
            ``None`` for all.
        min_p: classes stay that are at least this share of the likeliest's probability, from 0 to
            1; ``None`` for all.
        offsets: int64 ``[B + 1]``, where each sequence of packed logits starts and ends.
        shift: token *i* was sampled from row *i - 1* of its sequence, as in a model's own output
            over whole sequences; the first token of each then has an empty row. Without it token
            *i* was sampled from row *i*.

    Returns:
        int64 ids ``[S]``, those of a token in ascending order, and int64 offsets ``[N + 1]`` over
        all tokens, as :func:`support_log_probs` takes them. A row is empty where no class was left
        out.

    Raises:
        TypeError: a mask that is not bool, logits that are not floating point.
        ValueError: shapes that do not fit, an argument out of range.

    Example:
        >>> import torch
        >>> from fusedrl import sampling_support
        >>> logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]).log()
        >>> sampling_support(logits, top_p=0.7)
        (tensor([0, 1, 0, 1]), tensor([0, 2, 4]))
    """
    _dispatch.check_flags(shift=shift)
    _dispatch.check_tensor("logits", logits)
    _rows.check_rows("logits", logits, offsets, shift)
    tokens = logits.new_empty(logits.shape[:-1], dtype=torch.bool)
    _dispatch.check_mask(mask, tokens.shape, logits.device, " like the rows of logits")
    divisor = _dispatch.temperature_tensor(temperature, logits.device, "reference").item()
    _check_limits(top_k, top_p, min_p)
    rows, keep = rows_of_tokens(tokens, offsets, shift)
    kept = (keep if mask is None else keep & mask.flatten()).nonzero().squeeze(-1)
    counts, found = torch.zeros_like(rows), [rows.new_empty(0)]
    for part in kept.split(max(_CHUNK // logits.shape[-1], 1)):
        scores = logits.detach()[_rows.index_of(rows[part], logits)]
        scores = scores.to(_dispatch.result_dtype(logits)) / divisor
        left = _left(scores, top_k, top_p, min_p)
        left &= ~left.all(-1, keepdim=True)  # all classes are an empty row
        counts[part] = left.sum(-1)
        found.append(left.nonzero()[:, 1])
    return torch.cat(found), torch.cat((counts.new_zeros(1), counts.cumsum(0)))


def _left(scores: Tensor, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    """Which classes are left of each row of scores, which is overwritten."""
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
    return scores != -torch.inf  # NaN is left, as it spoils the row without a support too


def _check_limits(top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    if top_k is not None:
        number = _dispatch.real_number(top_k)
        if not isinstance(number, Integral) or number < 1:
            raise ValueError(
                f"top_k: expected an integer >= 1, got {top_k!r}; None keeps all classes"
            )
    if top_p is not None:
        number = _dispatch.real_number(top_p)
        if number is None or not 0 < number <= 1:
            raise ValueError(
                f"top_p: expected a number above 0 and up to 1, got {top_p!r}; None keeps all "
                "classes"
            )
    if min_p is not None:
        number = _dispatch.real_number(min_p)
        if number is None or not 0 <= number <= 1:
            raise ValueError(
                f"min_p: expected a number from 0 to 1, got {min_p!r}; None keeps all classes"
            )


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
    r"""Log-probability of each token under a softmax over its support alone.

    Only the rows of the weight that the support names are multiplied. Gradients reach ``hidden``,
    ``weight`` and ``bias``. From logits in memory, it is ``token_log_probs`` of the logits with
    -inf outside of the support.

    Args:
        hidden: as :func:`linear_token_log_probs` takes it, padded or packed, and so are all
            arguments but ``support``.
        weight: ``[V, H]``.
        tokens: integer class of each token, which is in its own support.
        support: integer ids ``[S]`` and offsets ``[N + 1]`` over all tokens, as
            :func:`sampling_support` returns them; an empty row stands for all classes.
        mask: bool, shaped like ``tokens``; ``None`` keeps all.
        bias: ``[V]``.
        softcap: positive bound of the logits.
        scale: positive factor of the logits.
        offsets: int64 ``[B + 1]``, where each sequence of a packed batch starts and ends.
        shift: token *i* reads row *i - 1* of its own sequence. Its support is its own.
        temperature: of the sampler.

    Returns:
        float32 log-probs shaped like ``tokens``; 0 for a dropped one.

    Raises:
        TypeError: a support that is no pair of integer tensors.
        ValueError: a support of another number of tokens, ids of a kept token that are no classes
            or do not ascend, or a kept token outside of its own ids. Nothing is computed then.
        Exception: what :func:`linear_token_log_probs` raises.

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
    if mask is not None:
        keep = keep & mask.flatten()
    ids, of_entries, own, listed = _entries(support, tokens, keep, len(head.weight))
    z = logits_of_head(head, rows[of_entries], ids)
    z = z / divisor.to(z)
    zeros = z.new_zeros(tokens.numel())
    largest = zeros.detach().scatter_reduce(0, of_entries, z.detach(), "amax", include_self=False)
    total = zeros.index_add(0, of_entries, (z - largest[of_entries]).exp())
    log_sum = largest + torch.where(listed, total, 1).log()
    chosen = zeros.index_add(0, of_entries, torch.where(own, z, 0))
    log_probs = torch.where(listed, chosen - log_sum, 0).view(tokens.shape)
    whole = (keep & ~listed).view(tokens.shape)
    if not bool(whole.any()):
        return log_probs
    of_whole = linear_token_log_probs(
        *(hidden, weight, tokens, whole),
        bias=bias,
        softcap=softcap,
        scale=scale,
        offsets=offsets,
        shift=shift,
        temperature=temperature,
    )
    return log_probs + of_whole.log_probs


def _entries(
    support: tuple[Tensor, Tensor], tokens: Tensor, keep: Tensor, classes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The classes of kept tokens, the token of each and whether it is its own; who has some."""
    if not isinstance(support, (tuple, list)) or len(support) != 2:
        got = _dispatch.kind(support)
        raise TypeError(f"support: expected ids and offsets, got {got}; {_SUPPORT}")
    for part in support:
        _dispatch.check_tensor("support", part)
        _dispatch.check_device("support", part, tokens.device)
        if part.dim() != 1 or part.dtype not in _rows.TOKEN_DTYPES:
            raise TypeError(
                f"support: expected integer ids [S] and offsets [N + 1], got {part.dtype} "
                f"{tuple(part.shape)}; {_SUPPORT}"
            )
    ids, starts = (part.to(torch.int64) for part in support)
    counts = starts.diff()
    ends = [int(starts[0]), int(starts[-1])] if len(starts) == tokens.numel() + 1 else None
    if ends != [0, len(ids)] or bool((counts < 0).any()):
        raise ValueError(
            f"support: expected {tokens.numel() + 1} offsets that grow from 0 to {len(ids)}, the "
            f"number of ids, got {len(starts)} that begin with {starts[:5].tolist()}; {_SUPPORT}"
        )
    listed = keep & (counts > 0)
    of_entries = torch.repeat_interleave(counts)
    read = listed[of_entries]
    ids, of_entries = ids[read], of_entries[read]
    wrong = (ids < 0) | (ids >= classes)
    wrong[1:] |= (ids.diff() <= 0) & (of_entries.diff() == 0)
    if bool(wrong.any()):
        first = wrong.nonzero()[0]
        raise ValueError(
            f"support: expected ids in [0, {classes}) that ascend within each token, got "
            f"{int(ids[first])} of token {int(of_entries[first])}; {_SUPPORT}"
        )
    own = ids == tokens.flatten()[of_entries]
    missing = listed.clone()
    missing[of_entries[own]] = False
    if bool(missing.any()):
        raise ValueError(
            f"support: expected every kept token among its own ids, got token "
            f"{int(missing.nonzero()[0])}, which is not; mask the token, or compute the support "
            "from the logits that it was sampled from"
        )
    return ids, of_entries, own, listed
