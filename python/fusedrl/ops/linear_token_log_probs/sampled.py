"""A head's logits of the classes that a truncated sampler left of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _saved_tensors
from fusedrl.ops._head import Head, scaled_and_capped
from fusedrl.ops._support import Entries
from fusedrl.ops.linear_top_k_kl import log_probs_of_ids

# A product by itself takes as long as about this many of tiles: 18 in a forward pass, 7 with the
# backward pass (float32, 48 rows of width 512, a vocabulary of 151,936, by CPU time).
CROSSOVER = 10
_MOST_PADDING = 4  # times the entries, in the tiles' table of classes


def logits_of(head: Head, entries: Entries, batch_invariant: bool) -> Tensor:
    """The logits ``[S]`` of the entries, up to a constant for each token."""
    width = 0 if batch_invariant else _width_of_tiles(head, entries)
    return _from_tiles(head, entries, width) if width else _sampled(head, entries)


def _width_of_tiles(head: Head, entries: Entries) -> int:
    """How many classes the token with the most has, where tiles of all logits are faster."""
    counts = entries.starts.diff()
    if len(entries.ids) * CROSSOVER <= len(head.weight) * len(counts):
        return 0
    if not _dispatch.has_values(counts):
        return 0
    most = int(counts.max())
    return most if most * len(counts) <= _MOST_PADDING * len(entries.ids) else 0


def _from_tiles(head: Head, entries: Entries, width: int) -> Tensor:
    """Log-probs over all classes, which the softmax over the entries makes their own."""
    tokens = entries.tokens
    at = torch.arange(len(tokens), device=tokens.device) - entries.starts[tokens]
    ids = tokens.new_full((len(entries.listed), width), -1).index_put((tokens, at), entries.ids)
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])[entries.rows.clamp(min=0)]
    one = torch.ones((), dtype=torch.float64, device="cpu")
    log_probs = log_probs_of_ids(
        head._replace(hidden=hidden), ids, entries.listed, None, False, one
    )
    return log_probs[tokens, at]


def _sampled(head: Head, entries: Entries) -> Tensor:
    """From products with the rows of the weight that the entries name alone."""
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
    args = (hidden, head.weight, entries.rows[entries.tokens], entries.ids)
    if _autograd.needs_grad(hidden=head.hidden, weight=head.weight, bias=head.bias):
        products = _autograd.apply(_Products, *args, entries.rows, entries.starts)
    else:
        products = torch.ops.fusedrl.sampled_products(*args)
    if head.bias is not None:
        products = products + head.bias.to(products.dtype)[entries.ids]
    return scaled_and_capped(products, head.scale, head.softcap)


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        _saved_tensors.save(ctx, *args)
        return torch.ops.fusedrl.sampled_products(*args[:4])

    @staticmethod
    @_autograd.first_derivative_only("support")
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids, rows_of_tokens, starts = _saved_tensors.saved(ctx)
        grad, backward = grads[0].contiguous(), torch.ops.fusedrl.sampled_products_backward
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            # A row's entries are those of the token that reads it; the last place is for no row.
            place = torch.where(rows_of_tokens < 0, len(hidden), rows_of_tokens)
            none = starts.new_zeros(len(hidden) + 1)
            begins, ends = (none.scatter(0, place, x)[:-1] for x in (starts[:-1], starts[1:]))
            of_hidden = backward(grad, ids, begins, ends, weight)
        if ctx.needs_input_grad[1]:
            classes = torch.arange(len(weight) + 1, device=ids.device)
            of_classes, order = torch.where(rows < 0, len(weight), ids).sort(stable=True)
            edges = torch.searchsorted(of_classes, classes)
            of_weight = backward(grad[order], rows[order], edges[:-1], edges[1:], hidden)
        return of_hidden, of_weight, None, None, None, None


def _fake(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    return hidden.new_empty(ids.shape, dtype=_dispatch.result_dtype(hidden))


def _fake_backward(
    grads: Tensor, index: Tensor, begins: Tensor, ends: Tensor, matrix: Tensor
) -> Tensor:
    return matrix.new_empty((len(begins), matrix.shape[1]))


_dispatch.register_fakes({"sampled_products": _fake, "sampled_products_backward": _fake_backward})
