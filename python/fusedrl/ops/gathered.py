"""Logits of selected classes of a row, from only their rows of the head's weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedrl.ops import _dispatch
from fusedrl.ops._head import Head, scaled_and_capped

_SLICE = 1 << 22  # elements that are gathered at a time


def logits_of_head(head: Head, rows: Tensor, ids: Tensor) -> Tensor:
    """The logit of class ``ids[s]`` in flat row ``rows[s]``, float32 ``[S]``."""
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])
    products: Any = _Products.apply(hidden, head.weight, rows, ids)
    if head.bias is not None:
        products = products + head.bias.to(products.dtype)[ids]
    return scaled_and_capped(products, head.scale, head.softcap)


class _Products(torch.autograd.Function):
    """``(hidden[rows] * weight[ids]).sum(-1)`` in float32, computed in slices to save memory."""

    @staticmethod
    def forward(hidden: Tensor, weight: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        dtype = _dispatch.result_dtype(hidden)
        slices = _slices(hidden, rows, ids)
        return torch.cat([(hidden[r].to(dtype) * weight[c]).sum(-1) for r, c in slices])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, ids = ctx.saved_tensors

        def gradient(of: Tensor, index: Tensor, other: Tensor, other_index: Tensor) -> Tensor:
            total = torch.zeros_like(of, dtype=grads[0].dtype)
            for grad, i, j in _slices(hidden, grads[0][:, None], index, other_index):
                total.index_add_(0, i, grad * other[j])
            return total.to(of.dtype)

        wanted = ctx.needs_input_grad
        grad_hidden = gradient(hidden, rows, weight, ids) if wanted[0] else None
        grad_weight = gradient(weight, ids, hidden, rows) if wanted[1] else None
        return grad_hidden, grad_weight, None, None


def _slices(hidden: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    size = max(_SLICE // hidden.shape[-1], 1)
    return zip(*(column.split(size) for column in columns), strict=True)
