"""Sequences grouped into forward passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Tokens in a row whose sequences share beginnings, if the caller sets no bound, for the attentions
# that take a mask. The more sequences in a row, the more they share; eager attention stores its
# square.
SHARING = {"sdpa": 4096, "eager": 1024}


def tokens_per_forward(device: torch.device, attention: str | None) -> int:
    """How many tokens a forward pass takes if the caller sets no bound.

    A packed row costs attention over its whole square unless a flash kernel knows the sequences.
    On a CPU, matrix products gain nothing beyond a few hundred rows, so that short sequences share
    a row and long ones have one each. The values for CUDA are not measured yet.
    """
    if device.type == "cpu":
        return 512
    return 16384 if str(attention).startswith("flash") else 4096


def check_limit(max_tokens_per_forward: int | None) -> None:
    """Refuse a bound below 1."""
    if max_tokens_per_forward is not None and max_tokens_per_forward < 1:
        raise ValueError(
            f"max_tokens_per_forward: expected a positive number or None, got "
            f"{max_tokens_per_forward}; None computes all sequences in one forward pass"
        )


def packed(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of sequences, packed into rows of at most ``limit`` tokens; a longer one is alone.

    The longest come first, each into the fullest row that has room (best fit decreasing).
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row, left in enumerate(room) if left >= lengths[i]]
        if fitting:
            row = min(fitting, key=room.__getitem__)
        else:
            row = len(rows)
            rows.append([])
            room.append(max(limit, lengths[i]))
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def padded(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of sequences, in batches of at most ``limit`` tokens, padding included.

    Sequences of similar lengths share a batch, the longest first. One beyond the limit is alone.
    """
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= limit:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
