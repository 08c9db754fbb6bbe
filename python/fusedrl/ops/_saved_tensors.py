"""Tensors that autograd functions save, checked against what saved-tensor hooks make of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusedrl.compat.torch import saves_through_hooks


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """``ctx.save_for_backward``, and what :func:`saved` needs to know where hooks are in force."""
    ctx.save_for_backward(*tensors)
    traced = torch.compiler.is_compiling()  # a graph gives itself back what it saved
    forms = None if traced or not saves_through_hooks() else [_form(x) for x in tensors]
    ctx.saved_forms = forms


def saved(ctx: Any) -> list[Any]:
    """``ctx.saved_tensors``, in a memory layout that kernels read.

    Torch accepts whatever a hook unpacks, and kernels trust what was checked before the forward
    pass. Raises ``RuntimeError`` for another dtype, shape or device.
    """
    tensors = list(ctx.saved_tensors)
    if ctx.saved_forms is None:
        return tensors
    return [_restored(*pair) for pair in zip(tensors, ctx.saved_forms, strict=True)]


def _restored(tensor: Tensor | None, form: tuple[Any, ...]) -> Tensor | None:
    found = _form(tensor)
    if found == form or tensor is None:
        return tensor
    if found[:-1] != form[:-1]:
        raise RuntimeError(
            f"saved tensors: expected {_described(form)}, as was saved for the backward pass, got "
            f"{_described(found)}; let the saved-tensor hook that unpacks restore dtype, shape and "
            "device"
        )
    return tensor.contiguous()


def _form(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None:
        return ()
    return tensor.dtype, tensor.shape, tensor.device, tensor.stride()


def _described(form: tuple[Any, ...]) -> str:
    dtype, shape, device, _ = form
    return f"{dtype} of shape {tuple(shape)} on {device}"
