"""The linear head of a language model, as an argument of ops that start from hidden states."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _dispatch, _rows


class Head(NamedTuple):
    """Hidden states and the head that maps them to logits; a ``softcap`` of 0 means no cap."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float

    def first(self, classes: int) -> Head:
        """The head restricted to the first classes; shares memory with this one."""
        bias = None if self.bias is None else self.bias[:classes]
        return self._replace(weight=self.weight[:classes], bias=bias)


def prepare(
    prefix: str,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> Head:
    """The checked head, cast under autocast; ``prefix`` is for the argument names in errors."""
    _dispatch.check_tensor(f"{prefix}hidden", hidden)
    _dispatch.check_tensor(f"{prefix}weight", weight)
    if bias is not None:
        _dispatch.check_tensor(f"{prefix}bias", bias)
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if type(tensor).__name__ == "DTensor":  # its module takes seconds to import
            raise TypeError(
                f"{prefix}{name}: expected a tensor of this rank, got a DTensor; pass .to_local() "
                "of a vocabulary's shard with vocab_offset= and vocab_group=, or .full_tensor()"
            )
    if not hidden.is_floating_point():
        raise TypeError(
            f"{prefix}hidden: expected a floating-point dtype, got {hidden.dtype}; pass the "
            "output of the last decoder layer"
        )
    hidden, weight = _autocast(hidden), _autocast(weight)
    bias = None if bias is None else _autocast(bias)
    if weight.dim() != 2 or weight.shape[1:] != hidden.shape[-1:] or len(weight) == 0:
        width = hidden.shape[-1] if hidden.dim() else "H"
        transposed = weight.dim() == 2 and weight.shape[0] == width
        raise ValueError(
            f"{prefix}weight: expected [V, {width}] for {prefix}hidden of shape "
            f"{tuple(hidden.shape)}, got {tuple(weight.shape)}; "
            + ("transpose it with .T" if transposed else "pass the weight of the same model's head")
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{prefix}bias: expected shape ({len(weight)},), got {tuple(bias.shape)}; "
            f"give one value for each class of {prefix}weight"
        )
    for name, tensor in ((f"{prefix}weight", weight), (f"{prefix}bias", bias)):
        if tensor is not None:
            _dispatch.check_device(name, tensor, hidden.device)
            _dispatch.check_dtype(name, tensor, f"{prefix}hidden", hidden.dtype)
    return Head(
        _rows.with_unit_stride(hidden),
        _rows.with_unit_stride(weight),
        None if bias is None else bias.contiguous(),
        _positive(f"{prefix}scale", scale, 1.0),
        _positive(f"{prefix}softcap", softcap, 0.0),
    )


def reference_logits(head: Head) -> Tensor:
    """Logits ``scale * (hidden W^T + bias)``, capped by ``softcap * tanh(logits / softcap)``.

    They are float32 (float64 for float64 input), also under autocast.
    """
    dtype = _dispatch.result_dtype(head.hidden)
    with torch.autocast(head.hidden.device.type, enabled=False):
        logits = head.hidden.to(dtype) @ head.weight.to(dtype).T
    if head.bias is not None:
        logits = logits + head.bias.to(dtype)
    return scaled_and_capped(logits, head.scale, head.softcap)


def scaled_and_capped(logits: Tensor, scale: float, softcap: float) -> Tensor:
    """Scaled and capped logits from the products of a head; a ``softcap`` of 0 means no cap."""
    logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def _autocast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype to which ``torch.nn.functional.linear`` casts it under autocast."""
    kind = tensor.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _positive(name: str, value: float | None, default: float) -> float:
    if value is None:
        return default
    low, high = 1 / _dispatch.LARGEST, _dispatch.LARGEST
    number = _dispatch.real_number(value)
    if number is None or not low <= number <= high:
        raise ValueError(
            f"{name}: expected a number from {low:g} to {high:g}, got {value!r}; "
            f"leave it out for no {name}"
        )
    return float(number)
