"""Sequences grouped into forward passes, and the inputs of each."""

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
    """The tokens of a sequence, which of them to score, and where it starts in the pack."""

    tokens: Tensor
    kept: Tensor
    start: int


class Pass(NamedTuple):
    """The inputs of a forward pass, and where the kept tokens of the pack are, at ``places`` there.

    ``predicting`` are the places in the pass, flattened, of the tokens before them. Attention
    ``follows`` the sequences by a mask that knows them, or takes their positions or padding.
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
            f"{max_tokens_per_forward}; None computes all sequences in one forward pass"
        )


def scored_sequences(tokens: Tensor, lengths: list[int], mask: Tensor | None) -> list[Scored]:
    """The sequences with tokens to score; nothing predicts the first token of each."""
    mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.cpu()
    starts = accumulate(lengths, initial=0)
    rows = zip(tokens.split(lengths), mask.split(lengths), starts, strict=False)
    work = [Scored(row, keep[1:].nonzero().squeeze(-1) + 1, start) for row, keep, start in rows]
    return [row for row in work if len(row.kept)]


def nothing_of(tokens: Tensor, device: torch.device) -> Pass:
    """A pass of one token in which nothing is scored."""
    one = tokens[:1] if len(tokens) else tokens.new_zeros(1)
    return _padded([Scored(one, tokens[:0], 0)], device)


def passes_of(
    model: Any, found: Capabilities, work: list[Scored], limit: int | None, share: bool
) -> list[Pass]:
    """The forward passes over sequences, of at most ``limit`` tokens where sequences share them.

    Shorter sequences first: those that are computed alone leave a model that remembers the longest
    call (dynamic NTK) as a sequence of their own length would.
    """
    device = device_of(model)
    together, alone = [], []
    for row in work:
        short = found.below is None or len(row.tokens) < found.below
        (together if short and found.together else alone).append(row)
    if found.parts is not None:
        passes = _packed_passes(found, found.parts, together, limit, share)
    else:
        passes = _padded_passes(together, limit or _usual(device, None), device)
    if alone and found.below is not None:  # makes the model forget its longest call
        passes.append(nothing_of(alone[0].tokens, device))
    alone.sort(key=lambda row: len(row.tokens))
    return passes + [_padded([row], device) for row in alone]


def _usual(device: torch.device, attention: str | None) -> int:
    """How many tokens a forward pass takes if the caller sets no bound.

    A packed row costs attention over its whole square unless a flash kernel knows the sequences,
    and a CPU gains nothing from more than a few hundred rows of a product. The values for CUDA are
    not measured yet.
    """
    if device.type == "cpu":
        return 512
    return 16384 if str(attention).startswith("flash") else 4096


def _packed_passes(
    found: Capabilities, parts: Parts, work: list[Scored], limit: int | None, share: bool
) -> list[Pass]:
    """Rows of sequences, in which a beginning that some ``share`` is once."""
    # Tokens before it predict a token, so the last kept one and all after it are not read.
    work = [row._replace(tokens=row.tokens[: int(row.kept[-1])]) for row in work]
    attention = attention_of(parts.config)
    usual = _usual(parts.embeddings.device, attention)
    most = max(usual, SHARING.get(str(attention), 0))
    # A model that gathers its weights for each pass makes fewer passes, of long rows, in which
    # attention then follows the sequences.
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
    """Indices of sizes, in rows that sum to at most ``limit``; a larger one is alone.

    The largest come first, each into the fullest row that has room (best fit decreasing).
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
    """Batches of at most ``limit`` tokens, padding included; a longer sequence is alone.

    Sequences of similar lengths share a batch, the longest first.
    """
    batches: list[list[Scored]] = []
    for row in sorted(work, key=lambda row: -len(row.tokens)):
        if batches and (len(batches[-1]) + 1) * len(batches[-1][0].tokens) <= limit:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [_padded(rows, device) for rows in batches]


def _padded(rows: list[Scored], device: torch.device) -> Pass:
    """A batch with padding on the right, because learned positions count from the left edge."""
    ids = pad_sequence([row.tokens for row in rows], batch_first=True)
    mask = pad_sequence([torch.ones_like(row.tokens) for row in rows], batch_first=True)
    paths = torch.arange(ids.numel(), device="cpu").view(ids.shape)
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return _pass(inputs, rows, list(paths), False)


def _pass(inputs: dict[str, Any], rows: list[Scored], paths: list[Tensor], follows: bool) -> Pass:
    """A pass in which each sequence has the places of its path."""
    places = torch.cat([row.kept + row.start for row in rows])
    predicting = [path[row.kept - 1] for row, path in zip(rows, paths, strict=True)]
    return Pass(inputs, places, torch.cat(predicting), follows)
