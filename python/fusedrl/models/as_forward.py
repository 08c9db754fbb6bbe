"""A function in the place of a module's forward, within all that surrounds a call of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


def as_forward(
    module: nn.Module, function: Callable[..., tuple[Tensor, ...]], call: Callable[[], Any]
) -> tuple[Tensor, ...]:
    """Results of ``function``, which runs as the forward of ``module`` while ``call`` calls that.

    FSDP gathers weights before a forward, and hangs what it does in the backward pass on the
    tensors that leave it; DDP and others are wrapped around it. All of them are in force here. The
    values are those of ``function``, whatever they are rounded to on the way out. An error in it is
    raised when all that is around the module has ended.
    """
    inside: list[tuple[Tensor, ...]] = []
    errors: list[BaseException] = []

    def forward(*args: Any) -> tuple[Tensor, ...]:
        try:
            inside.append(function(*args))
        except BaseException as error:  # FSDP takes a forward that raises for one that still runs
            errors.append(error)
            return ()
        return inside[-1]

    place = _PLACES.setdefault(module, _Place())
    own = vars(module).get("forward")
    module.forward, place.function = place.forward, forward
    left: Any = ()
    try:
        left = call()
    except Exception:
        if not errors:
            raise
    finally:
        place.function = None
        if own is None:
            del module.forward
        else:
            module.forward = own
    if errors:
        raise errors.pop()
    if len(inside) != 1:
        raise RuntimeError(
            f"model: expected one call of its {type(module).__name__} in a forward pass, got "
            f"{len(inside)}; call the wrapper that calls it once"
        )
    pairs = zip(left, inside[0], strict=True)
    return tuple(
        out if out.dtype == value.dtype else _WithGradientOf.apply(value.detach(), out)
        for out, value in pairs
    )


class _Place:
    """What stands in the place of a module's forward, the same each time for a compiled graph."""

    def __init__(self) -> None:
        self.function: Any = None
        # What is compiled in it is compiled by itself: the decoder.
        self.forward = torch.compiler.disable(lambda *args, **_: self.function(*args))


_PLACES: WeakKeyDictionary[nn.Module, _Place] = WeakKeyDictionary()


class _WithGradientOf(torch.autograd.Function):
    """A value whose gradient is that of another tensor, to whose dtype torch converts it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, source: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]
