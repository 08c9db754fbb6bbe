"""Conversions between ragged representations and packed values with offsets.

A ragged batch of B sequences is ``values [N, ...]``, the sequences one after the other, and
``offsets``, int64 ``[B + 1]``: sequence *b* is ``values[offsets[b]:offsets[b + 1]]``. Conversions
share memory with their input where its layout allows; each docstring states when data is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import (
    NestedTensor,
    as_plain_tensor,
    lengths_beside_holes,
    ragged_dimension,
    strided_sizes,
    strided_view,
    values_without_history,
)


class Packed(NamedTuple):
    """Packed ``values [N, ...]`` and their ``offsets``, int64 ``[B + 1]`` on the same device."""

    values: Tensor
    offsets: Tensor


def offsets_of(lengths: Sequence[int] | Tensor, device: torch.device | None = None) -> Tensor:
    """Offsets ``[B + 1]`` of sequences with these lengths.

    They are on ``device``, by default that of the lengths: for a list the CPU, whatever torch's
    default device is.
    """
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths, dtype=torch.int64, device=device or "cpu")
    lengths = lengths.to(device or lengths.device, torch.int64)
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def from_list(tensors: Sequence[Tensor]) -> Packed:
    """Pack a list of ``[T_i, ...]`` tensors; copies once.

    Raises ``ValueError`` for an empty list, which has no dtype and no device.

    Example:
        >>> import torch
        >>> from fusedrl import ragged
        >>> packed = ragged.from_list([torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
        >>> packed.values, packed.offsets
        (tensor([1., 2., 3.]), tensor([0, 2, 3]))
    """
    if len(tensors) == 0:
        raise ValueError(
            "tensors: expected at least one tensor, got an empty list; pass one for each sequence"
        )
    return Packed(
        torch.cat(tuple(tensors)), offsets_of([len(t) for t in tensors], tensors[0].device)
    )


def from_nested(nested: Tensor, name: str = "nested") -> Packed:
    """Pack a nested tensor of either layout, ragged in dimension 1; ``name`` is for errors.

    The values share memory with a contiguous tensor. A view with holes (``narrow``) or permuted
    dimensions is copied. Raises ``ValueError`` for another ragged dimension or no sequence.
    """
    if isinstance(nested, NestedTensor):
        values, offsets = jagged_parts(nested, name)
        return Packed(values, offsets.to(torch.int64))
    sizes = strided_sizes(nested)
    if sizes.dim() != 2 or sizes.numel() == 0:
        raise ValueError(
            f"{name}: expected at least one sequence of at least one dimension, got a nested "
            "tensor without any; only a jagged tensor or a list may be empty"
        )
    trailing = sizes[0, 1:].tolist()
    if not bool((sizes[:, 1:] == sizes[0, 1:]).all()):
        raise ValueError(
            f"{name}: expected one ragged dimension (the first of each sequence), got sequence "
            f"shapes {sizes.tolist()}; pass a list of packed tensors instead"
        )
    contiguous = nested if nested.is_contiguous() else nested.contiguous()
    return Packed(
        contiguous.values().view(-1, *trailing), offsets_of(sizes[:, 0], contiguous.device)
    )


def jagged_parts(nested: Tensor, name: str = "nested") -> tuple[Tensor, Tensor]:
    """Values and offsets of a jagged tensor; copies only if it has holes, and can be traced."""
    assert isinstance(nested, NestedTensor)
    ragged_in = ragged_dimension(nested)
    if ragged_in != 1:
        raise ValueError(
            f"{name}: expected a jagged tensor ragged in dimension 1, got one ragged in dimension "
            f"{ragged_in}; transpose it back"
        )
    lengths = lengths_beside_holes(nested)
    if lengths is not None:
        if _has_graph(nested):
            # The backward pass of torch's contiguous() ignores the holes.
            return torch.cat(nested.unbind()), offsets_of(lengths)
        nested = nested.contiguous()
        assert isinstance(nested, NestedTensor)
    values = nested.values() if _has_graph(nested) else values_without_history(nested)
    return values, nested.offsets()


def _has_graph(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return True
    with as_plain_tensor():
        return tensor.requires_grad


def to_list(ragged: Packed) -> list[Tensor]:
    """The sequences as views of ``values``; reads the offsets on the host."""
    return list(ragged.values.split(ragged.offsets.diff().tolist()))


def to_jagged(ragged: Packed) -> Tensor:
    """A jagged nested tensor that shares the memory."""
    if _has_graph(ragged.values):
        return torch.nested.nested_tensor_from_jagged(ragged.values, ragged.offsets)
    return NestedTensor(ragged.values, ragged.offsets)


def to_strided(ragged: Packed, lengths: Sequence[int] | None = None) -> Tensor:
    """A strided nested tensor that shares the memory.

    Passing ``lengths``, Python integers, avoids reading the offsets from the device. Raises
    ``ValueError`` if there is no sequence: this layout cannot be empty.
    """
    values = ragged.values.contiguous()
    trailing = list(values.shape[1:])
    rows = torch.tensor(
        ragged.offsets.diff().tolist() if lengths is None else lengths,
        dtype=torch.int64,
        device="cpu",
    )
    if rows.numel() == 0:
        raise ValueError("ragged: expected at least one sequence, got none; use to_jagged")
    strides = [1]
    for size in reversed(trailing):
        strides.insert(0, strides[0] * size)
    count = rows.numel()
    sizes = torch.tensor([0, *trailing], device="cpu").expand(count, -1).clone()
    sizes[:, 0] = rows
    steps = torch.tensor(strides, device="cpu").expand(count, -1).contiguous()
    starts = offsets_of(rows)[:-1] * strides[0]
    if values.storage_offset() != 0:
        values = values.clone()  # the view below starts at offset 0 of the storage
    return strided_view(values.view(-1), sizes, steps, starts)
