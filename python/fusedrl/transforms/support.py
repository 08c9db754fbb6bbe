"""The support of truncated sampling as data has it: classes, and how many each token has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from fusedrl.transforms.columns import column_rows, columns_of, entries_of

IDS, COUNTS = ("sampling_support", "ids"), ("sampling_support", "counts")


def support_in(
    td: TensorDictBase, attended: Tensor | None, lengths: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """The support of the packed tokens of a batch, on the CPU; ``None`` if the data has none.

    Args:
        td: for each sample integer classes ``[S]`` under ``IDS``, padded or not, and how many of
            them each token has under ``COUNTS``, ``[T]`` as its tokens are.
        attended: bool ``[B, T]``, which places of the padded batch are tokens; ``None`` if the
            tokens came without padding.
        lengths: tokens of each sample.

    Raises:
        ValueError: one of the two is missing, or does not fit the other or the tokens.
    """
    columns = columns_of(td)
    ids, counts = columns.get(IDS), columns.get(COUNTS)
    if ids is None and counts is None:
        return None
    for key, column in ((IDS, ids), (COUNTS, counts)):
        if column is None:
            raise ValueError(f"{key}: expected classes and counts, got none; give both or neither")
    assert ids is not None and counts is not None
    all_ids, all_counts = [], []
    rows = zip(column_rows(ids), column_rows(counts), strict=True)
    for i, (classes, of_tokens) in enumerate(rows):
        mine = of_tokens.cpu()
        if len(mine) != lengths[i] and attended is not None and len(mine) == attended.shape[1]:
            mine = mine[attended[i].cpu()]
            if int(mine.sum()) != int(of_tokens.sum()):
                raise ValueError(
                    f"{COUNTS}: expected 0 where sample {i} is padded, got others; set them to 0, "
                    "and leave out their classes"
                )
        total = int(mine.sum())
        if len(mine) != lengths[i] or len(classes) < total:
            raise ValueError(
                f"{COUNTS}: expected {lengths[i]} counts, one for each token, that sum to at most "
                f"{len(classes)} classes, got {len(mine)} that sum to {total} in sample {i}; give "
                "0 to tokens that were not sampled"
            )
        all_ids.append(classes[:total].cpu())
        all_counts.append(mine)
    ends: Any = torch.cat(all_counts).cumsum(0)
    return torch.cat(all_ids), torch.cat((ends.new_zeros(1), ends))


def refuse_support(td: TensorDictBase, why: object) -> None:
    """Refuse data with a support where other code computes log-probs, over all classes."""
    if any(value is not None for value in entries_of(td, IDS)):
        raise ValueError(
            f"{IDS}: expected none where log-probs are not computed from hidden states, got some, "
            f"and {why}; delete the entry to train on all classes"
        )
