"""Shared by ops over rows: shape checks, and the sequence that a token belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

from fusedrl.ops import _dispatch

TOKEN_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_rows(name: str, rows: Tensor, offsets: Tensor | None, shift: bool) -> None:
    """Refuse rows that are neither a padded batch nor a packed one with the offsets it needs."""
    _dispatch.check_floating(name, rows)
    width = "V" if "logits" in name else "H"
    if rows.dim() not in (2, 3):
        raise ValueError(
            f"{name}: expected [N, {width}] packed or [B, T, {width}] padded, "
            f"got shape {tuple(rows.shape)}; give each token one row"
        )
    if rows.shape[-1] == 0:
        raise ValueError(
            f"{name}: expected {width} of at least 1, got shape {tuple(rows.shape)}; "
            "pass the whole rows"
        )
    if rows.dim() == 3 and offsets is not None:
        raise ValueError(
            f"offsets: expected None with padded [B, T, {width}] {name} (one sequence a row), "
            "got a tensor; leave it out, or pass packed rows"
        )
    if rows.dim() == 2 and shift and offsets is None:
        raise ValueError(
            f"offsets: expected the sequence boundaries of packed [N, {width}] {name} with "
            "shift=True, got None; pass offsets=torch.tensor([0, N]) if all rows are one sequence"
        )
    _dispatch.check_offsets(offsets, rows.shape[:-1].numel(), rows.device)


def check_tokens(tokens: Tensor, name: str, rows: Tensor) -> None:
    """Refuse tokens that are not integers, one for each row of the argument ``name``."""
    _dispatch.check_tensor("tokens", tokens, like=f" like {name}")
    if tokens.dtype not in TOKEN_DTYPES:
        raise TypeError(
            f"tokens: expected an integer dtype up to int64, got {tokens.dtype}; "
            "convert it with .long()"
        )
    _dispatch.check_same(
        *("tokens", tokens, rows.shape[:-1], rows.device),
        *(f" for {name}", rows, "give one class for each row"),
    )


def with_unit_stride(rows: Tensor) -> Tensor:
    """The rows, copied only if their last dimension does not have stride 1."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def index_of(rows: Tensor, batch: Tensor) -> tuple[Tensor, ...]:
    """Flat row numbers as an index into a packed or padded batch, which need not be flattened."""
    if batch.dim() == 2:
        return (rows,)
    length = max(batch.shape[1], 1)
    return rows // length, rows % length


def sequence_of_tokens(tokens: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The sequence index of each token, flat, and the number of sequences.

    Packed tokens without offsets are one sequence.
    """
    if offsets is not None:
        count = len(offsets) - 1
        each = torch.arange(count, device=tokens.device)
        index = torch.repeat_interleave(each, offsets.diff(), output_size=tokens.numel())
        return index, count
    places = torch.arange(tokens.numel(), device=tokens.device)
    return places // max(tokens.shape[-1], 1), len(tokens) if tokens.dim() == 2 else 1
