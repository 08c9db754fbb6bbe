"""Group sequences into forward passes, and build the inputs of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl.compat.transformers import attention_of
from fusedrl.models.comparison import Capabilities
from fusedrl.models.prefix_tree import cut, in_order
from fusedrl.models.split import Parts, device_of
from fusedrl.models.tree_mask import SHARING, row_of


class Scored(NamedTuple):
    """A sequence: its tokens, the indices to score, and its start among the packed tokens."""

    tokens: Tensor
    kept: Tensor
    start: int


class Pass(NamedTuple):
    """The inputs of a forward pass, and the ``places`` of its kept tokens among all packed tokens.

    ``predicting`` are the flat places in the pass of the tokens before them. If attention
    ``follows`` the sequences, it uses a :class:`TreeMask`, else positions or padding.
    """

    inputs: dict[str, Any]
    places: Tensor
    predicting: Tensor
    follows: bool


def check_limit(max_tokens_per_forward: int | None) -> None:
    """Refuse a bound below 1."""
    if max_tokens_per_forward is not None and max_tokens_per_forward < 1:
        raise ValueError(
            f"max_tokens_per_forward: expected a positive number or None, got "
            f"{max_tokens_per_forward}; pass None for the default"
        )


def scored_sequences(tokens: Tensor, lengths: list[int], mask: Tensor | None) -> list[Scored]:
    """The sequences with tokens to score, among which the first of a sequence never is."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.cpu()
    starts = accumulate(lengths, initial=0)
    rows = zip(tokens.split(lengths), mask.split(lengths), starts, strict=False)
    work = [Scored(row, keep[1:].nonzero().squeeze(-1) + 1, start) for row, keep, start in rows]
    return [row for row in work if len(row.kept)]


def nothing_of(tokens: Tensor, device: torch.device) -> Pass:
    """A pass of one token, which is not scored."""
    one = tokens[:1] if len(tokens) else tokens.new_zeros(1)
    return _padded([Scored(one, tokens[:0], 0)], device)


def passes_of(
    model: Any, found: Capabilities, work: list[Scored], limit: int | None, share: bool
) -> list[Pass]:
    """The forward passes over sequences, of at most ``limit`` tokens if they share passes.

    Sequences that run alone come in order of length, because a model with dynamic NTK adapts to the
    longest call so far.
    """
    device = device_of(model)
    batched, alone = [], []
    for row in work:
        short = found.below is None or len(row.tokens) < found.below
        (batched if short and found.batches else alone).append(row)
    if found.parts is not None:
        passes = _packed_passes(found, found.parts, batched, limit, share)
    else:
        passes = _padded_passes(batched, limit or _usual(device, None), device)
    if alone and found.below is not None:  # a short call resets dynamic NTK
        passes.append(nothing_of(alone[0].tokens, device))
    alone.sort(key=lambda row: len(row.tokens))
    return passes + [_padded([row], device) for row in alone]


def _usual(device: torch.device, attention: str | None) -> int:
    """The default limit of tokens in a forward pass.

    Attention over a packed row costs the square of its length except in a flash kernel with
    sequence boundaries, and on a CPU matrix products of a few hundred rows are fast enough. The
    values for CUDA have not been measured.
    """
    if device.type == "cpu":
        return 512
    return 16384 if str(attention).startswith("flash") else 4096


def _packed_passes(
    found: Capabilities, parts: Parts, work: list[Scored], limit: int | None, share: bool
) -> list[Pass]:
    """Passes of one row of sequences each, in which a common prefix occurs once if ``share``."""
    # A token is predicted by those before it, so the last kept one is not part of the input.
    work = [row._replace(tokens=row.tokens[: int(row.kept[-1])]) for row in work]
    attention = attention_of(parts.config)
    usual = _usual(parts.embeddings.device, attention)
    most = max(usual, SHARING.get(str(attention), 0))
    # If weights are gathered for each pass, fewer passes of longer rows are faster; a mask then
    # limits attention to each sequence.
    follows = found.shares and parts.gathered
    shared = [0] * len(work)
    if share and found.shares:
        order, shared = in_order([row.tokens for row in work])
        work = [work[i] for i in order]
    groups = cut([len(row.tokens) for row in work], shared, limit or most)
    for group in groups:
        shared[group.start] = 0
    sizes = [sum(len(work[i].tokens) - shared[i] for i in group) for group in groups]
    passes = []
    for packed in _packed(sizes, limit or (most if follows else usual)):
        chosen = [i for group in packed for i in groups[group]]
        common, rows = [shared[i] for i in chosen], [work[i] for i in chosen]
        masked = any(common) or (follows and len(rows) > 1)
        tree, inputs = row_of([row.tokens for row in rows], common, parts, masked)
        passes.append(_pass(inputs, rows, [part.path for part in tree], masked))
    return passes


def _packed(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Indices of sizes in rows that sum to at most ``limit``; a larger size has its own row.

    Best fit decreasing: from the largest, each goes to the fullest row with enough room.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fitting = [row for row, left in enumerate(room) if left >= sizes[i]]
        row = min(fitting, key=room.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(max(limit, sizes[i]))
        rows[row].append(i)
        room[row] -= sizes[i]
    return rows


def _padded_passes(work: list[Scored], limit: int, device: torch.device) -> list[Pass]:
    """Batches of at most ``limit`` tokens including padding; a longer sequence has its own batch.

    Sequences are sorted by length, to save padding.
    """
    batches: list[list[Scored]] = []
    for row in sorted(work, key=lambda row: -len(row.tokens)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].tokens) <= limit:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_padded(rows, device) for rows in batches]


def _padded(rows: list[Scored], device: torch.device) -> Pass:
    """A right-padded batch, as learned positions start at the first column."""
    ids = pad_sequence([row.tokens for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones_like(row.tokens) for row in rows], batch_first=True)
    paths = torch.arange(ids.numel(), device="cpu").view(ids.shape)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return _pass(inputs, rows, list(paths), False)


def _pass(inputs: dict[str, Any], rows: list[Scored], paths: list[Tensor], follows: bool) -> Pass:
    """A pass in which ``paths`` are the places of each sequence."""
    places = torch.cat([row.kept + row.start for row in rows])
    predicting = [path[row.kept - 1] for row, path in zip(rows, paths, strict=True)]
    return Pass(inputs, places, torch.cat(predicting), follows)
