"""Find common prefixes of token sequences, to lay out and compute each of them once.

Sequences are sorted, so that neighbours share the longest prefixes. A common prefix is rounded down
to whole blocks, because a branch costs more than a few tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # tokens
LEAST = 32  # tokens of a prefix that is worth sharing


class Part(NamedTuple):
    """The places of a sequence in a row of tokens.

    ``path`` ``[T]`` has the places of all its tokens: the first ``shared`` are those of earlier
    sequences, the rest are contiguous.
    """

    path: Tensor
    shared: int

    @property
    def own(self) -> Tensor:
        """The places of the tokens that are not shared with an earlier sequence."""
        return self.path[self.shared :]


def in_order(rows: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Indices that sort token sequences, and the number of tokens each shares with the one before.

    The number is 0 or at least ``LEAST``, and a multiple of ``BLOCK`` unless it is all tokens of
    the sequence before.
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

    Groups are cut where nothing is shared, and otherwise so that the total number of tokens is
    minimal. A sequence that is longer than the limit is a group by itself.
    """
    fewest = [0]  # minimal total of tokens in groups up to each sequence
    starts: list[int] = []  # the first sequence of the last of these groups
    # A heap of candidates for the start of the current group, as (total, tokens of the group,
    # start); both numbers are relative to `own`, the unshared tokens of all sequences so far.
    candidates: list[tuple[int, int, int]] = []
    own = 0
    for last, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        if not common:
            candidates.clear()
        own += length - common
        heappush(candidates, (fewest[last] + length - own, length - own, last))
        while candidates[0][1] + own > limit and candidates[0][2] != last:
            heappop(candidates)
        best, _, start = candidates[0]
        fewest.append(best + own)
        starts.append(start)
    groups: list[range] = []
    end = len(lengths)
    while end:
        groups.append(range(starts[end - 1], end))
        end = starts[end - 1]
    return groups[::-1]


def laid_out(lengths: Sequence[int], shared: Sequence[int]) -> list[Part]:
    """The places of sequences in a row, each after the one whose prefix it shares."""
    parts: list[Part] = []
    first = 0
    for length, common in zip(lengths, shared, strict=True):
        own = torch.arange(first, first + length - common, device="cpu")
        parts.append(Part(torch.cat((parts[-1].path[:common], own)) if common else own, common))
        first += len(own)
    return parts
