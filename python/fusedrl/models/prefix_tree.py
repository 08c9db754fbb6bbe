"""Beginnings that token sequences share, each of which is laid out and computed once.

Sequences are sorted, so that those with the same beginning are neighbours. Each then continues the
one before it: it has the places of their common tokens, and new places for its own. A common part
counts in whole blocks, because a branch costs more than a few tokens do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # tokens
LEAST = 32  # tokens of a beginning that is worth sharing


class Part(NamedTuple):
    """Where a sequence is in a row of tokens.

    ``path`` has the places of all its tokens, ``[T]``. The last ``own`` of them are its own, from
    the place ``first`` on.
    """

    path: Tensor
    first: int
    own: int

    @property
    def shared(self) -> int:
        """How many tokens it has of other sequences."""
        return len(self.path) - self.own


def in_order(rows: Sequence[Tensor]) -> list[int]:
    """Indices of token sequences, sorted so that common beginnings are neighbours."""
    return sorted(range(len(rows)), key=lambda i: rows[i].numpy().tobytes())


def shared_with_former(rows: Sequence[Tensor]) -> list[int]:
    """How many tokens each of the sorted sequences shares with the one before it; 0 for the first.

    It is a multiple of ``BLOCK``, or all tokens of the one before, and at least ``LEAST`` or 0.
    """
    shared = [0] * min(len(rows), 1)
    for former, row in pairwise(rows):
        shortest = min(len(former), len(row))
        different = (former[:shortest] != row[:shortest]).nonzero()
        common = int(different[0]) if len(different) else shortest
        if common < len(former):
            common -= common % BLOCK
        shared.append(common if common >= LEAST else 0)
    return shared


def cut(lengths: Sequence[int], shared: Sequence[int], limit: int) -> list[range]:
    """Divide sorted sequences into groups of at most ``limit`` tokens, shared ones counted once.

    There is a cut wherever nothing is shared, and beyond that the fewest tokens are laid out that
    are possible (dynamic programming over the first sequence of the last group). A sequence that is
    longer than the limit is alone.
    """
    fewest = [0]  # tokens of the groups that end before each sequence
    starts: list[int] = []  # the first sequence of the last of them
    # Possible first sequences of a group, the one with the fewest tokens in all first: these, and
    # the tokens of the group, both less those that all sequences so far have of their own.
    possible: deque[tuple[int, int, int]] = deque()
    own = 0
    for end, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if not common:
            possible.clear()
        own += length - common
        size = length - own
        while possible and possible[-1][0] > fewest[end] + size:
            possible.pop()
        possible.append((fewest[end] + size, size, end))
        while len(possible) > 1 and possible[0][1] + own > limit:
            possible.popleft()
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
        path = torch.cat((parts[-1].path[:common], own)) if common else own
        parts.append(Part(path, first, len(own)))
        first += len(own)
    return parts
