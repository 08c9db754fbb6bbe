"""Beginnings that token sequences share, each of which is laid out and computed once.

Sequences are sorted, so that each continues the one before it. A common part counts in whole
blocks, because a branch costs more than a few tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # tokens
LEAST = 32  # tokens of a beginning that is worth sharing


class Part(NamedTuple):
    """Where a sequence is in a row of tokens.

    ``path`` has the places of all its tokens, ``[T]``. The first ``shared`` of them are those of
    other sequences, and the rest lie side by side.
    """

    path: Tensor
    shared: int

    @property
    def own(self) -> Tensor:
        """The places of the tokens that no sequence before it has."""
        return self.path[self.shared :]


def in_order(rows: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Indices that sort token sequences, and how many tokens each shares with the one before it.

    That is a multiple of ``BLOCK``, or all tokens of the one before, and at least ``LEAST`` or 0.
    """
    order = sorted(range(len(rows)), key=lambda i: rows[i].numpy().tobytes())
    shared = [0] * min(len(rows), 1)
    for former, row in pairwise(rows[i] for i in order):
        shortest = min(len(former), len(row))
        different = (former[:shortest] != row[:shortest]).nonzero()
        common = int(different[0]) if len(different) else shortest
        if common < len(former):
            common -= common % BLOCK
        shared.append(common if common >= LEAST else 0)
    return order, shared


def cut(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[range]:
    """Divide sorted sequences into groups of at most ``limit`` tokens, shared ones counted once.

    There is a cut wherever nothing is shared, and beyond that the fewest tokens are laid out that
    are possible. A sequence that is longer than the limit is alone.
    """
    fewest = [0]  # tokens of the groups that end before each sequence
    starts: list[int] = []  # the first sequence of the last of them
    # A heap of first sequences of a group: the fewest tokens in all with it, and the tokens of the
    # group, both less what all sequences so far have of their own.
    possible: list[tuple[int, int, int]] = []
    own = 0
    for last, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if not common:
            possible.clear()
        own += length - common
        heappush(possible, (fewest[last] + length - own, length - own, last))
        while possible[0][1] + own > limit and possible[0][2] != last:
            heappop(possible)
        best, _, start = possible[0]
        fewest.append(best + own)
        starts.append(start)
    groups: list[range] = []
    end = len(lengths)
    while end:
        groups.append(range(starts[end - 1], end))
        end = starts[end - 1]
    return groups[::-1]


def laid_out(lengths: Sequence[int], shared: Sequence[int]) -> list[Part]:
    """The places of sequences in a row, in which each follows the one it shares tokens with."""
    parts: list[Part] = []
    first = 0
    for length, common in zip(lengths, shared, strict=True):
        own = torch.arange(first, first + length - common, device="cpu")
        parts.append(Part(torch.cat((parts[-1].path[:common], own)) if common else own, common))
        first += len(own)
    return parts
