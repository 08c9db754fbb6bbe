"""The student's log-probs of ``top_k_kl`` in plain torch: what kernels are tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops._dispatch import result_dtype
from fusedrl.ops.token_log_probs.reference import place_of, rows_of_tokens


def kept_rows(
    ids: Tensor, mask: Tensor | None, offsets: Tensor | None, shift: bool
) -> tuple[Tensor, Tensor]:
    """The flat tokens that are computed, and the flat row that each of them reads."""
    rows, keep = rows_of_tokens(ids[..., 0], offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    return kept, rows[kept]


def log_probs(
    logits: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
) -> Tensor:
    """Log-probs ``[..., k + 1]`` of the ids and of all other classes; 0 for dropped tokens.

    Computes in float32 (float64 for float64 logits) and differentiates through torch's autograd.
    """
    kept, rows = kept_rows(ids, mask, offsets, shift)
    values = of_rows(logits.reshape(-1, logits.shape[-1])[rows], ids, kept, temperature)
    return scattered(values, kept, ids)


def of_rows(logits: Tensor, ids: Tensor, kept: Tensor, temperature: Tensor) -> Tensor:
    """Log-probs ``[M, k + 1]`` of the ``kept`` tokens, from their rows of ``logits``."""
    classes = logits.shape[-1]
    shape, ids = ids.shape[:-1], ids.reshape(-1, ids.shape[-1])[kept].long()
    there, places = ids >= 0, ids.clamp(min=0)
    _check(ids, kept, shape, classes)
    z = logits.to(result_dtype(logits))
    z = z.masked_fill(z == -torch.inf, -torch.inf)  # no gradient reaches a banned class
    log_softmax = torch.log_softmax(z / temperature.to(z), dim=-1)
    counts = torch.zeros_like(z, dtype=torch.int64).scatter_add(-1, places, there.long())
    others = log_softmax.masked_fill(counts > 0, -torch.inf)
    none = (others == -torch.inf).all(-1)
    rest = others.masked_fill(none[:, None], 0).logsumexp(-1).masked_fill(none, -torch.inf)
    of_ids = log_softmax.gather(-1, places).masked_fill(~there, 0)
    return torch.cat((of_ids, rest[:, None]), -1)


def scattered(values: Tensor, kept: Tensor, ids: Tensor) -> Tensor:
    """The ``values`` of kept tokens at their places among all tokens; the others have 0."""
    width = values.shape[-1]
    zeros = values.new_zeros(ids.shape[:-1].numel(), width)
    return zeros.index_put((kept,), values).view(*ids.shape[:-1], width)


def _check(ids: Tensor, kept: Tensor, shape: torch.Size, classes: int) -> None:
    if torch.compiler.is_compiling():
        return  # gather then checks their range itself
    outside = (ids >= classes).any(-1).nonzero()
    if len(outside):
        raise RuntimeError(
            f"ids: expected values below {classes}, got {int(ids[outside[0, 0]].max())} at "
            f"{place_of(int(kept[outside[0, 0]]), shape)}; mask the token, or set the id to -1"
        )
    in_order = ids.sort(-1).values
    twice = ((in_order.diff(dim=-1) == 0) & (in_order[:, 1:] >= 0)).nonzero()
    if len(twice):
        row, place = twice[0].tolist()
        raise RuntimeError(
            f"ids: expected every class at most once a token, got {int(in_order[row, place])} "
            f"twice at {place_of(int(kept[row]), shape)}; set one of them to -1"
        )
