"""Reference implementation of ``token_log_probs`` in plain torch, to test kernels against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops._dispatch import result_dtype


def rows_of_tokens(tokens: Tensor, offsets: Tensor | None, shift: bool) -> tuple[Tensor, Tensor]:
    """The flat row that each flat token reads, and whether it reads one.

    Without ``shift``, token *n* reads row *n*. With it, token *n* reads row *n - 1*, and the first
    token of every sequence (a row of ``tokens``, or a span of ``offsets``) reads none.
    """
    count = tokens.numel()
    rows = torch.arange(count, device=tokens.device)
    present = torch.ones(count + 1, dtype=torch.bool, device=tokens.device)
    if shift:
        # The last element is for empty sequences after the last token.
        if offsets is not None:
            first = offsets[:-1]
        else:
            first = torch.arange(0, count, max(tokens.shape[-1], 1), device=tokens.device)
        # An indexed assignment would copy its value from the host and synchronise.
        present.index_fill_(0, first.to(torch.int64), False)
        rows = rows - 1
    return rows, present[:-1]


def place_of(token: int, shape: torch.Size) -> str:
    """The position of a flat token among tokens of this shape, for an error message."""
    if len(shape) == 1:
        return f"token {token}"
    return "row {}, column {}".format(*divmod(token, shape[-1]))


def check_targets(targets: Tensor, kept: Tensor, shape: torch.Size, classes: int) -> None:
    """Refuse a target outside the classes.

    ``targets`` are those of the flat tokens ``kept``; ``shape`` is that of all tokens.
    """
    if torch.compiler.is_compiling():
        return  # gather checks them then
    outside = ((targets < 0) | (targets >= classes)).nonzero()
    if len(outside):
        target = int(targets[outside[0]])
        # A negative id is padding; one beyond the vocabulary comes from another tokenizer.
        remedy = ", or make the tokens with the tokenizer of this model" if target >= 0 else ""
        raise RuntimeError(
            f"tokens: expected values in [0, {classes}), got {target} at "
            f"{place_of(int(kept[outside[0]]), shape)}; leave it out with mask{remedy}"
        )


def token_log_probs(
    logits: Tensor,
    tokens: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs gathered from a ``log_softmax`` over the kept rows; 0 for other tokens.

    Computes in float32 (float64 for float64 logits); differentiable.
    """
    rows, keep = rows_of_tokens(tokens, offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    dtype = result_dtype(logits)
    z = logits.reshape(-1, logits.shape[-1])[rows[kept]].to(dtype)
    log_softmax = torch.log_softmax(z / temperature.to(z), dim=-1)
    targets = tokens.flatten()[kept]
    check_targets(targets, kept, tokens.shape, logits.shape[-1])
    zeros = torch.zeros(tokens.numel(), dtype=dtype, device=logits.device)
    log_probs = zeros.index_put(
        (kept,), log_softmax.gather(-1, targets[:, None].long()).squeeze(-1)
    )
    if not entropy:
        return log_probs.view(tokens.shape), None
    p = log_softmax.exp()
    row_entropy = -(p * log_softmax.masked_fill(p == 0, 0)).sum(-1)
    return log_probs.view(tokens.shape), zeros.index_put((kept,), row_entropy).view(tokens.shape)
