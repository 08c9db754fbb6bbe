"""Checks for the only derivative of compiled ops: first order, reverse mode, no torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fusedrl.compat.torch import in_forward_mode, is_batched, is_transformed, untransformed


def needs_grad(**inputs: Tensor | None) -> bool:
    """Whether a gradient has to be recorded.

    Raises ``NotImplementedError``, with the name of the input, for gradients that no kernel
    computes: in forward mode, or under a transform of ``torch.func``.
    """
    if in_forward_mode():
        for name, tensor in inputs.items():
            if tensor is not None and _has_tangent(tensor):
                raise NotImplementedError(
                    f"{name}: expected a tensor without a forward-mode tangent (forward_ad, "
                    "torch.func.jvp, jacfwd), got one with; differentiate in reverse mode, or "
                    "pass impl='reference'"
                )
    if not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        return any(tensor is not None and tensor.requires_grad for tensor in inputs.values())
    recorded = False
    for name, tensor in inputs.items():
        if tensor is None:
            continue
        if is_transformed(tensor) and _records(tensor):
            raise NotImplementedError(
                f"{name}: expected a tensor outside the transforms of torch.func (grad, vjp, "
                "jacrev, vmap) where a gradient is recorded, got one inside; differentiate with "
                "torch.autograd, or pass impl='reference'"
            )
        recorded = recorded or tensor.requires_grad
    return recorded


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, where a tensor may occur twice, such as one weight for two heads.

    Dynamo refuses the same tensor twice, but accepts a view of it.
    """
    if not torch.compiler.is_compiling():
        return function.apply(*args)
    distinct: list[Any] = []
    for arg in args:
        seen = isinstance(arg, Tensor) and any(arg is other for other in distinct)
        distinct.append(arg.view_as(arg) if seen else arg)
    return function.apply(*distinct)


def _records(tensor: Tensor) -> bool:
    # Inside vmap, a tensor does not report that the wrapped one requires a gradient.
    while is_transformed(tensor):
        if tensor.requires_grad:
            return True
        tensor = untransformed(tensor)
    return tensor.requires_grad


def _has_tangent(tensor: Tensor) -> bool:
    # Inside vmap, a tangent cannot be unpacked.
    return is_batched(tensor) or forward_ad.unpack_dual(tensor).tangent is not None


SECOND_DERIVATIVE = "pass impl='reference', which has one"


def first_derivative_only(
    op: str, remedy: str = SECOND_DERIVATIVE
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the ``backward`` of an autograd function without a second derivative.

    See :func:`check_first_derivative`. It is not needed in a compiled graph, whose gradients torch
    refuses to differentiate.
    """

    def mark(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def checked(ctx: Any, *grads: Tensor) -> Any:
            if not torch.compiler.is_compiling():
                check_first_derivative(op, remedy)
            with torch.no_grad():
                return backward(ctx, *grads)

        return checked

    return mark


def check_first_derivative(op: str, remedy: str = SECOND_DERIVATIVE) -> None:
    """Refuse a backward pass that autograd records (``create_graph=True``).

    Results of kernels have no autograd graph, so that a second derivative would silently be 0, and
    the backward pass cannot see whether its result will be differentiated.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"{op}: expected a backward pass with create_graph=False, as its kernels have no "
            f"second derivative, got create_graph=True; {remedy}"
        )
