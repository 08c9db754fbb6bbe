"""The definition of ``token_log_probs`` in plain torch: what kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops._dispatch import result_dtype


def rows_of_tokens(tokens: Tensor, offsets: Tensor | None, shift: bool) -> tuple[Tensor, Tensor]:
    """Flat logits row that predicts each flat token, and whether there is one.

    Without ``shift`` token *n* reads row *n*. With it, token *n* reads row *n - 1*, and the first
    token of every sequence (a row of ``tokens``, or a span of ``offsets``) has none.
    """
    count = tokens.numel()
    rows = torch.arange(count, device=tokens.device)
    present = torch.ones(count + 1, dtype=torch.bool, device=tokens.device)
    if shift:
        # The last place is for empty sequences behind the last token.
        if offsets is not None:
            first = offsets[:-1]
        else:
            first = torch.arange(0, count, max(tokens.shape[-1], 1), device=tokens.device)
        # An assignment by index would copy its value from the host, and wait for the device.
        present.index_fill_(0, first.to(torch.int64), False)
        rows = rows - 1
    return rows, present[:-1]


def place_of(token: int, shape: torch.Size) -> str:
    """The place of a flat token among tokens of this shape, in words, for an error about it."""
    if len(shape) == 1:
        return f"token {token}"
    return "row {}, column {}".format(*divmod(token, shape[-1]))


def check_targets(targets: Tensor, kept: Tensor, shape: torch.Size, classes: int) -> None:
    """Refuse a target outside the classes.

    They are the targets of the flat tokens ``kept``; ``shape`` is that of all tokens.
    """
    if torch.compiler.is_compiling():
        return  # gather then checks them itself
    outside = ((targets < 0) | (targets >= classes)).nonzero()
    if len(outside):
        target = int(targets[outside[0]])
        # An id below 0 stands for no token; one behind the last is of another tokenizer.
        other = ", or make the tokens with the tokenizer of this model" if target >= 0 else ""
        raise RuntimeError(
            f"tokens: expected values in [0, {classes}), got {target} at "
            f"{place_of(int(kept[outside[0]]), shape)}; leave it out with mask{other}"
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
    """Gather the log-probs from a ``log_softmax`` over the kept rows; they are 0 elsewhere.

    Computes in float32 (float64 for float64 logits) and differentiates through torch's autograd.
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
