"""A function in the place of a module's forward, within all that surrounds a call of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl.compat.torch import in_no_graph_of_its_caller


def as_forward(
    module: nn.Module, function: Callable[..., tuple[Tensor, ...]], call: Callable[[], Any]
) -> tuple[Tensor, ...]:
    """Results of ``function``, which runs as the forward of ``module`` while ``call`` calls that.

    FSDP gathers weights before a forward, and hangs what it does in the backward pass on the
    tensors that leave it; DDP and others are wrapped around it. All of them are in force here.

    Args:
        module: whose forward it is.
        function: gets the positional arguments of the call.
        call: calls the module or what is around it, once.

    Returns:
        The values as ``function`` returned them, whatever they are rounded to on the way out. Their
        gradients go the way that the module's output took.
    """
    inside: list[tuple[Tensor, ...]] = []

    @in_no_graph_of_its_caller
    def forward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        inside.append(function(*args))
        return inside[-1]

    own = vars(module).get("forward")
    module.forward = forward
    try:
        left = call()
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
    if len(inside) != 1:
        raise RuntimeError(
            f"model: expected one call of its {type(module).__name__} in a forward pass, got "
            f"{len(inside)}; call the wrapper that calls it once"
        )
    pairs = zip(left, inside[0], strict=True)
    return tuple(
        out if out.dtype == value.dtype else _Unrounded.apply(out, value.detach())
        for out, value in pairs
    )


class _Unrounded(torch.autograd.Function):
    """A value as it was before a module rounded what left it, with the gradient of that."""

    @staticmethod
    def forward(ctx: Any, rounded: Tensor, value: Tensor) -> Tensor:
        ctx.dtype = rounded.dtype
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None
