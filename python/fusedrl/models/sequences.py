"""Sequences that share forward passes, and the inputs of one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl.models import forwards
from fusedrl.models.capabilities import Capabilities


class Scored(NamedTuple):
    """The tokens of a sequence, which of them to score, and where it starts in the pack."""

    tokens: Tensor
    kept: Tensor
    start: int


class Pass(NamedTuple):
    """The inputs of a forward pass, its sequences, and where each starts in it, flattened."""

    inputs: dict[str, Tensor]
    rows: list[Scored]
    firsts: list[int]

    @property
    def read(self) -> Tensor:
        """Places of the kept tokens in the pass, flattened."""
        pairs = zip(self.rows, self.firsts, strict=True)
        return torch.cat([row.kept + first for row, first in pairs])

    @property
    def places(self) -> Tensor:
        """Places of the kept tokens in the pack."""
        return torch.cat([row.kept + row.start for row in self.rows])


def scored_sequences(tokens: Tensor, lengths: Sequence[int], mask: Tensor | None) -> list[Scored]:
    """The sequences and the tokens to score in them; nothing predicts the first one of each."""
    masks = [None] * len(lengths) if mask is None else mask.cpu().split(list(lengths))
    work = []
    starts = accumulate(lengths, initial=0)
    for start, row, keep in zip(starts, tokens.split(list(lengths)), masks, strict=False):
        everything = torch.arange(len(row), device="cpu")
        kept = everything if keep is None else keep.nonzero().squeeze(-1)
        work.append(Scored(row, kept[kept > 0], start))
    return work


def nothing_of(tokens: Tensor) -> Scored:
    """A sequence of one token in which nothing is scored."""
    kept = torch.empty(0, dtype=torch.int64, device="cpu")
    return Scored(tokens.new_zeros(1) if len(tokens) == 0 else tokens[:1], kept, 0)


def passes_of(
    capabilities: Capabilities, work: Sequence[Scored], device: torch.device, limit: int
) -> list[Pass]:
    """The forward passes over ``work``, of at most ``limit`` tokens where sequences share them.

    Shorter sequences first: those that are computed alone leave a model that remembers the longest
    call (dynamic NTK) as a sequence of their own length would.
    """
    together, alone = [], []
    for row in work:
        short = capabilities.below is None or len(row.tokens) < capabilities.below
        (together if short and (capabilities.packs or capabilities.pads) else alone).append(row)
    if capabilities.packs:
        # Tokens before it predict a token, so the last kept one and all after it are not read.
        together = [
            row._replace(tokens=row.tokens[: int(row.kept[-1])]) if len(row.kept) else row
            for row in together
        ]
    lengths = [len(row.tokens) for row in together]
    grouped = (
        forwards.packed(lengths, limit) if capabilities.packs else forwards.padded(lengths, limit)
    )
    build = _packed if capabilities.packs else _padded
    passes = [build([together[i] for i in group], device) for group in grouped]
    if alone and capabilities.below is not None:  # makes the model forget its longest call
        alone.append(nothing_of(alone[0].tokens))
    alone.sort(key=lambda row: len(row.tokens))
    return passes + [_padded([row], device) for row in alone]


def _packed(rows: list[Scored], device: torch.device) -> Pass:
    """One row of sequences, which are kept apart only by positions that start again."""
    lengths = [len(row.tokens) for row in rows]
    ids = torch.cat([row.tokens for row in rows])
    positions = torch.cat([torch.arange(n, device="cpu") for n in lengths])
    inputs = {"input_ids": ids[None].to(device), "position_ids": positions[None].to(device)}
    return Pass(inputs, rows, list(accumulate(lengths[:-1], initial=0)))


def _padded(rows: list[Scored], device: torch.device) -> Pass:
    """A batch with padding on the right, because learned positions count from the left edge."""
    ids = pad_sequence([row.tokens for row in rows], batch_first=True)
    width = ids.shape[1]
    lengths = torch.tensor([[len(row.tokens)] for row in rows], device="cpu")
    mask = (torch.arange(width, device="cpu") < lengths).long()
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    return Pass(inputs, rows, [i * width for i in range(len(rows))])
