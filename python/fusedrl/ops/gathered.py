"""Logits of some classes of a row, for which only their rows of the head are multiplied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _dispatch
from fusedrl.ops._head import Head, scaled_and_capped

_SLICE = 1 << 22  # elements of the rows that are gathered at a time


def logits_of_head(head: Head, rows: Tensor, ids: Tensor) -> Tensor:
    """The logit of class ``ids[s]`` in flat row ``rows[s]``, float32 ``[S]``."""
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
    products: Any = _Products.apply(hidden, head.weight, rows, ids)
    if head.bias is not None:
        products = products + head.bias.to(products.dtype)[ids]
    return scaled_and_capped(products, head.scale, head.softcap)


class _Products(torch.autograd.Function):
    """``(hidden[rows] * weight[ids]).sum(-1)`` in float32, of which a slice is in memory."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        dtype = _dispatch.result_dtype(hidden)
        size = _size(hidden)
        slices = zip(rows.split(size), ids.split(size), strict=True)
        return torch.cat([(hidden[r].to(dtype) * weight[c]).sum(-1) for r, c in slices])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors
        of_hidden, of_weight = (
            torch.zeros_like(x, dtype=grads[0].dtype) if wanted else None
            for x, wanted in zip((hidden, weight), ctx.needs_input_grad, strict=False)
        )
        slices = (x.split(_size(hidden)) for x in (grads[0][:, None], rows, ids))
        for grad, r, c in zip(*slices, strict=True):
            if of_hidden is not None:
                of_hidden.index_add_(0, r, grad * weight[c])
            if of_weight is not None:
                of_weight.index_add_(0, c, grad * hidden[r])
        return (
            None if of_hidden is None else of_hidden.to(hidden.dtype),
            None if of_weight is None else of_weight.to(weight.dtype),
            None,
            None,
        )


def _size(hidden: Tensor) -> int:
    return max(_SLICE // hidden.shape[-1], 1)
