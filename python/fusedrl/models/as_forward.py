"""Run a function in place of a module's forward, inside all wrappers and hooks of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


def as_forward(
    module: nn.Module, function: Callable[..., tuple[Tensor, ...]], call: Callable[[], Any]
) -> tuple[Tensor, ...]:
    """The results of ``function``, run as the forward of ``module`` when ``call`` calls it.

    So FSDP gathers the weights and attaches its backward hooks to the results, and DDP and other
    wrappers see the call. The values are those of ``function``, even if a wrapper casts outputs. An
    error in ``function`` is raised after the wrappers have returned.
    """
    inside: list[tuple[Tensor, ...]] = []
    errors: list[BaseException] = []

    def forward(*args: Any) -> tuple[Tensor, ...]:
        try:
            inside.append(function(*args))
        except BaseException as error:  # FSDP would consider the forward to be still running
            errors.append(error)
            return ()
        return inside[-1]

    stand_in = _STAND_INS.setdefault(module, _StandIn())
    original = vars(module).get("forward")
    module.forward, stand_in.function = stand_in.forward, forward
    outputs: Any = ()
    try:
        outputs = call()
    except Exception:
        if not errors:
            raise
    finally:
        stand_in.function = None
        if original is None:
            del module.forward
        else:
            module.forward = original
    if errors:
        raise errors.pop()
    if len(inside) != 1:
        raise RuntimeError(
            f"model: expected one call of its {type(module).__name__} in a forward pass, got "
            f"{len(inside)}; call the wrapper that calls it once"
        )
    pairs = zip(outputs, inside[0], strict=True)
    return tuple(
        out if out.dtype == value.dtype else _WithGradientOf.apply(value.detach(), out)
        for out, value in pairs
    )


class _StandIn:
    """The replacement of a module's forward, kept so that compiled graphs see the same object."""

    def __init__(self) -> None:
        self.function: Any = None
        # Only the decoder inside it is compiled.
        self.forward = torch.compiler.disable(lambda *args, **_: self.function(*args))


_STAND_INS: WeakKeyDictionary[nn.Module, _StandIn] = WeakKeyDictionary()


class _WithGradientOf(torch.autograd.Function):
    """A value whose gradient goes to another tensor, in the dtype of that tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]
