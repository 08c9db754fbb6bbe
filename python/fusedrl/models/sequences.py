"""Sequences that share forward passes, and the inputs of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl.models import forwards, prefix_tree
from fusedrl.models.capabilities import Capabilities
from fusedrl.models.prefix_tree import Part
from fusedrl.models.tree_mask import mask_of


class Scored(NamedTuple):
    """The tokens of a sequence, which of them to score, and where it starts in the pack."""

    tokens: Tensor
    kept: Tensor
    start: int


class Pass(NamedTuple):
    """The inputs of a forward pass, its sequences, and where each is in it, flattened.

    ``follows`` says whether attention follows the sequences by a mask that knows them.
    """

    inputs: dict[str, Any]
    rows: list[Scored]
    parts: list[Part]
    follows: bool = False

    @property
    def read(self) -> Tensor:
        """Places of the kept tokens in the pass, flattened."""
        return self._at(0)

    @property
    def predicting(self) -> Tensor:
        """Places of the tokens before them, which predict them."""
        return self._at(-1)

    def _at(self, offset: int) -> Tensor:
        pairs = zip(self.rows, self.parts, strict=True)
        return torch.cat([part.path[row.kept + offset] for row, part in pairs])

    @property
    def places(self) -> Tensor:
        """Places of the kept tokens in the pack."""
        return torch.cat([row.kept + row.start for row in self.rows])

    @property
    def shares(self) -> bool:
        """Whether its sequences share tokens."""
        return any(part.own < len(part.path) for part in self.parts)


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
    capabilities: Capabilities,
    work: Sequence[Scored],
    device: torch.device,
    limit: int,
    most: int,
    may_share: Callable[[], bool] | None,
    follows: bool = False,
) -> list[Pass]:
    """The forward passes over ``work``, of at most ``limit`` tokens where sequences share them.

    If sequences share their beginnings, a pass has at most ``most`` tokens. ``may_share`` says
    whether they may, and is asked only if they have some in common; ``None`` says that they do not.
    Attention ``follows`` the sequences of a row with a mask, as it does where they share some, or
    takes their positions.

    Shorter sequences first: those that are computed alone leave a model that remembers the longest
    call (dynamic NTK) as a sequence of their own length would.
    """
    together, alone = [], []
    for row in work:
        short = capabilities.below is None or len(row.tokens) < capabilities.below
        (together if short and capabilities.together else alone).append(row)
    if capabilities.parts is not None:
        passes = _packed_passes(capabilities, together, device, limit, most, may_share, follows)
    else:
        grouped = forwards.padded([len(row.tokens) for row in together], limit)
        passes = [_padded([together[i] for i in group], device) for group in grouped]
    if alone and capabilities.below is not None:  # makes the model forget its longest call
        alone.append(nothing_of(alone[0].tokens))
    alone.sort(key=lambda row: len(row.tokens))
    return passes + [_padded([row], device) for row in alone]


def _packed_passes(
    capabilities: Capabilities,
    work: list[Scored],
    device: torch.device,
    limit: int,
    most: int,
    may_share: Callable[[], bool] | None,
    follows: bool,
) -> list[Pass]:
    # Tokens before it predict a token, so the last kept one and all after it are not read.
    work = [
        row._replace(tokens=row.tokens[: int(row.kept[-1])]) if len(row.kept) else row
        for row in work
    ]
    shared = [0] * len(work)
    if may_share is not None:
        ordered = [work[i] for i in prefix_tree.in_order([row.tokens for row in work])]
        common = prefix_tree.shared_with_former([row.tokens for row in ordered])
        if any(common) and may_share():
            work, shared = ordered, common
    groups = prefix_tree.cut([len(row.tokens) for row in work], shared, most)
    for group in groups:
        shared[group.start] = 0
    sizes = [sum(len(work[i].tokens) - shared[i] for i in group) for group in groups]
    passes = []
    for packed in forwards.packed(sizes, limit):
        chosen = [i for group in packed for i in groups[group]]
        parts = prefix_tree.laid_out(
            [len(work[i].tokens) for i in chosen], [shared[i] for i in chosen]
        )
        rows = [work[i] for i in chosen]
        passes.append(_packed(rows, parts, capabilities, device, follows and len(rows) > 1))
    return passes


def _packed(
    rows: list[Scored],
    parts: list[Part],
    capabilities: Capabilities,
    device: torch.device,
    follows: bool,
) -> Pass:
    """One row of sequences, kept apart by positions that start again, or by a mask."""
    inputs = prefix_tree.row_of([row.tokens for row in rows], parts, device)
    made = Pass(inputs, rows, parts, follows)
    if made.shares:
        made = made._replace(follows=True)
    if made.follows:
        whole = capabilities.parts
        assert whole is not None
        inputs["attention_mask"] = mask_of(parts, whole.config, whole.embeddings)
    return made


def _padded(rows: list[Scored], device: torch.device) -> Pass:
    """A batch with padding on the right, because learned positions count from the left edge."""
    ids = pad_sequence([row.tokens for row in rows], batch_first=True)
    width = ids.shape[1]
    lengths = [len(row.tokens) for row in rows]
    mask = torch.arange(width, device="cpu") < torch.tensor(lengths, device="cpu")[:, None]
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.long().to(device)}
    parts = [
        Part(torch.arange(i * width, i * width + length, device="cpu"), i * width, length)
        for i, length in enumerate(lengths)
    ]
    return Pass(inputs, rows, parts)
