"""What ops over rows share: checks of ``[N, ...]`` and ``[B, T, ...]``, packing of nested."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _dispatch

_TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_rows(name: str, rows: Tensor, offsets: Tensor | None, shift: bool) -> None:
    """Refuse what is no batch of rows, packed with offsets where a shift needs them, or padded."""
    _dispatch.check_floating(name, rows)
    width, column = ("V", "class") if "logits" in name else ("H", "feature")
    if rows.dim() not in (2, 3):
        raise ValueError(
            f"{name}: expected [N, {width}] packed or [B, T, {width}] padded, "
            f"got shape {tuple(rows.shape)}"
        )
    if rows.shape[-1] == 0:
        raise ValueError(f"{name}: expected at least one {column}, got shape {tuple(rows.shape)}")
    if rows.dim() == 3 and offsets is not None:
        raise ValueError(
            f"offsets: expected None with padded [B, T, {width}] {name} (one sequence a row), "
            "got a tensor; leave it out, or pass packed rows without padding"
        )
    if rows.dim() == 2 and shift and offsets is None:
        raise ValueError(
            f"offsets: expected the sequence boundaries of packed [N, {width}] {name} with "
            "shift=True, got None; pass offsets=torch.tensor([0, N]) if all rows are one sequence"
        )
    _dispatch.check_offsets(offsets, rows.shape[:-1].numel(), rows.device)


def check_tokens(tokens: Tensor, rows: Tensor, like: str) -> None:
    """Refuse tokens that are no integers, one for each of the rows called ``like``."""
    _dispatch.check_tensor("tokens", tokens, like=f" like the {like}")
    if tokens.dtype not in _TOKEN_DTYPES:
        raise TypeError(
            f"tokens: expected an integer dtype up to int64, got {tokens.dtype}; "
            "convert it with .long()"
        )
    _dispatch.check_same("tokens", tokens, rows.shape[:-1], rows.device)


def with_unit_stride(rows: Tensor) -> Tensor:
    """The rows themselves, or a copy where their elements do not lie side by side."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def count_sequences(tokens: Tensor, offsets: Tensor | None) -> int:
    """Sequences of a packed ``[N]`` batch with offsets, or rows of a padded one; else one."""
    if offsets is not None:
        return len(offsets) - 1
    return len(tokens) if tokens.dim() == 2 else 1


def sequence_of_tokens(tokens: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The number of the sequence that each token is of, flat, and how many sequences there are."""
    count = count_sequences(tokens, offsets)
    if offsets is not None:
        each = torch.arange(count, device=tokens.device)
        index = torch.repeat_interleave(each, offsets.diff(), output_size=tokens.numel())
        return index, count
    places = torch.arange(tokens.numel(), device=tokens.device)
    return places // max(tokens.shape[-1], 1), count


class Packed(NamedTuple):
    """The values of a nested batch, of its companions, and the way back for a value a token."""

    values: Tensor
    offsets: Tensor
    companions: list[Tensor | None]
    rewrap: Callable[[Tensor], Tensor]


def pack(
    name: str,
    nested: Tensor,
    offsets: Tensor | None,
    over: str | None = None,
    form: str = "[B, j, columns]",
    **companions: Tensor | None,
) -> Packed:
    """A nested tensor and its companions, of the same sequence lengths, as packed values.

    Its dimensions are as many as those of ``form``, ``[B, j, columns]`` or ``[B, j]``.

    The answer is nested over the offsets of the companion ``over``, or of the rows, so that it
    composes with that tensor.
    """
    if offsets is not None:
        raise ValueError(f"offsets: expected None with nested {name}, which carry their own")
    packed = ragged.from_nested(nested, name)
    if nested.dim() != form.count(",") + 1:
        raise ValueError(f"{name}: expected a nested {form}, got one of {nested.dim()} dimensions")
    values = [
        None if value is None else _dispatch.nested_values(key, value, name, packed.offsets)
        for key, value in companions.items()
    ]
    model = companions[over] if over is not None else nested
    assert model is not None

    def rewrap(flat: Tensor) -> Tensor:
        if model.layout == torch.jagged:
            return ragged.to_jagged(ragged.Ragged(flat, ragged.jagged_parts(model)[1]))
        return ragged.to_strided(ragged.Ragged(flat, packed.offsets))

    return Packed(packed.values, packed.offsets, values, rewrap)
