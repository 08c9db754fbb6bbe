"""What ops over rows of logits share: their checks, and nested batches as packed ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _dispatch


def check_logits(logits: Tensor, offsets: Tensor | None, shift: bool) -> None:
    """Refuse what is no batch of rows, ``[N, V]`` packed or ``[B, T, V]`` padded."""
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits: expected a floating-point dtype, got {logits.dtype}")
    if logits.dim() not in (2, 3):
        raise ValueError(
            f"logits: expected [N, V] packed or [B, T, V] padded, got shape {tuple(logits.shape)}"
        )
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: expected at least one class, got shape {tuple(logits.shape)}")
    if logits.dim() == 3 and offsets is not None:
        raise ValueError("offsets: expected None with padded [B, T, V] logits (one sequence a row)")
    if logits.dim() == 2 and shift and offsets is None:
        raise ValueError(
            "offsets: expected the sequence boundaries of packed [N, V] logits with shift=True, "
            "got None; pass offsets=torch.tensor([0, N]) if all rows are one sequence"
        )
    _dispatch.check_offsets(offsets, logits.shape[:-1].numel(), logits.device)


def with_unit_stride(logits: Tensor) -> Tensor:
    """The rows themselves, or a copy where their elements do not lie side by side."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


class Packed(NamedTuple):
    """The values of a nested batch, of its companions, and the way back for a value a token."""

    values: Tensor
    offsets: Tensor
    companions: list[Tensor | None]
    rewrap: Callable[[Tensor], Tensor]


def pack(logits: Tensor, offsets: Tensor | None, **companions: Tensor | None) -> Packed:
    """Nested logits and their companions, of the same sequence lengths, as packed values."""
    if offsets is not None:
        raise ValueError("offsets: expected None with nested logits, which carry their own")
    packed = ragged.from_nested(logits)

    def values_of(name: str, companion: Tensor | None) -> Tensor | None:
        if companion is None:
            return None
        if not companion.is_nested:
            raise ValueError(f"{name}: expected a nested tensor like the logits, got a dense one")
        values, own = ragged.from_nested(companion)
        if own is not packed.offsets and not torch.equal(own, packed.offsets):
            raise ValueError(f"{name}: expected the sequence lengths of the logits, got others")
        return values

    def rewrap(values: Tensor) -> Tensor:
        # Over the logits' own offsets, so that the answer composes with them.
        if logits.layout == torch.jagged:
            return ragged.to_jagged(ragged.Ragged(values, ragged.jagged_parts(logits)[1]))
        return ragged.to_strided(ragged.Ragged(values, packed.offsets))

    own_values = [values_of(name, companion) for name, companion in companions.items()]
    return Packed(packed.values, packed.offsets, own_values, rewrap)
