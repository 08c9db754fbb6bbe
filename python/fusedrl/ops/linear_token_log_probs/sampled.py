"""A head's logits of the classes that a truncated sampler left of each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _saved_tensors
from fusedrl.ops._head import Head, scaled_and_capped
from fusedrl.ops._support import Entries


def logits_of(head: Head, entries: Entries) -> Tensor:
    """The logits ``[S]`` of the entries, of which no other row of the weight is read."""
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
    @_autograd.first_derivative_only("linear_token_log_probs")
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
