"""Which classes a sampler leaves of each row of logits: top-k, top-p and min-p."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _rows
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
        all tokens, as ``support`` of :func:`token_log_probs` takes them. A row is empty where no
        class was left out.

    Raises:
        TypeError: a mask that is not bool, logits that are not floating point.
        ValueError: shapes that do not fit, an argument out of range.

    Example:
        >>> import torch
        >>> from fusedrl import sampling_support, token_log_probs
        >>> logits = torch.tensor([[0.6, 0.3, 0.1], [0.4, 0.35, 0.25]]).log()
        >>> support = sampling_support(logits, top_p=0.7)
        >>> support
        (tensor([0, 1, 0, 1]), tensor([0, 2, 4]))
        >>> token_log_probs(logits, torch.tensor([0, 1]), support=support).exp()
        tensor([0.6667, 0.4667])
    """
    _dispatch.check_tensor("logits", logits)
    _rows.check_rows("logits", logits, offsets, shift)
    tokens = logits.new_empty(logits.shape[:-1], dtype=torch.bool)
    _dispatch.check_mask(mask, tokens.shape, logits.device, " like the rows of logits")
    divisor = _dispatch.temperature_tensor(temperature, logits.device, "reference").item()
    _check_limits(top_k, top_p, min_p)
    flat = logits.detach().reshape(-1, logits.shape[-1])
    rows, keep = rows_of_tokens(tokens, offsets, shift)
    kept = (keep if mask is None else keep & mask.flatten()).nonzero().squeeze(-1)
    counts, found = torch.zeros_like(rows), [rows.new_empty(0)]
    for part in kept.split(max(_CHUNK // logits.shape[-1], 1)):
        scores = flat[rows[part]].to(_dispatch.result_dtype(logits)) / divisor
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
    if top_k is not None and (type(top_k) is not int or top_k < 1):
        raise ValueError(f"top_k: expected an integer >= 1, got {top_k!r}; None keeps all classes")
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
