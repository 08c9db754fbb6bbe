"""Which tokens of a batch are too old to train on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from fusedrl.objectives.tokens import LossBatch
from fusedrl.ops.importance_weights.staleness import check_versions, oldest_allowed
from fusedrl.transforms.columns import column_rows

TOKENS_KEY = "token_policy_version"  # as policies report it, and importance_weights takes it
# A number, or what returns it.
PolicyVersionSource = int | Callable[[], int]


def without_stale(loss: Any, batch: LossBatch, td: TensorDictBase) -> LossBatch:
    """The batch without the tokens that ``loss.max_token_staleness`` leaves out.

    Raises ``ValueError`` for data without a version for each counted token, and for a batch of
    which nothing is left.
    """
    if loss.max_token_staleness is None:
        return batch
    source = loss.policy_version
    newest = source() if callable(source) else source
    oldest = oldest_allowed(newest, loss.max_token_staleness)
    versions = _versions(batch, td)
    unknown = batch.counted & (versions < 0)
    if bool(unknown.any()):
        raise ValueError(
            f"{TOKENS_KEY}: expected a version for every counted token, got none for "
            f"{int(unknown.sum())} of {int(batch.counted.sum())}; count those of the last response "
            "alone (masking_strategy='sft'), or give one for each token of the conversation"
        )
    stale = batch.counted & (versions < oldest)
    if bool(batch.counted.any()) and torch.equal(stale, batch.counted):
        raise nothing_fresh(loss)
    return batch._replace(counted=batch.counted & ~stale)


def nothing_fresh(loss: Any) -> ValueError:
    """The error of a batch that has no token to train on but stale ones."""
    return ValueError(
        "max_token_staleness: expected some token with a log-prob of at most "
        f"{loss.max_token_staleness} versions before the newest, got none; skip the batch, or "
        "raise the bound"
    )


def _versions(batch: LossBatch, td: TensorDictBase) -> Tensor:
    """The version of each place, ``[B, T]``, -1 for none.

    A row of versions as long as the conversation is of its tokens, one as long as the tokens that
    count is of these, and a shorter one is of the last tokens; -1 fills it up. What 0 fills up, as
    padded tensors do by default, is refused.
    """
    column: Any = td.get(TOKENS_KEY, None, as_list=True)  # pyright: ignore[reportCallIssue]
    if column is None:
        raise ValueError(
            f"{TOKENS_KEY}: expected the versions of the tokens with max_token_staleness, got "
            "none; collect with a policy that reports them, such as a vLLM engine with a channel"
        )
    versions = torch.full(batch.ids.shape, -1, dtype=torch.int64, device=batch.ids.device)
    rows = zip(versions, batch.attended, batch.counted, column_rows(column), strict=True)
    for row, attended, counted, found in rows:
        check_versions(found)
        known = found[found >= 0]
        # Weights only become newer while an answer is sampled.
        if bool(((known[:-1] > 0) & (known[1:] == 0)).any()):
            raise ValueError(
                f"{TOKENS_KEY}: expected -1 behind the versions of an answer, got 0, which is the "
                "version of weights that an engine starts with; pad with padding_value=-1"
            )
        places, counting = (x.nonzero().squeeze(-1) for x in (attended, counted))
        if len(found) == len(places):
            row[places] = found.to(row)
            continue
        own = known.to(row)
        if len(own) == len(counting):
            places = counting
        if len(own) > len(places):
            raise ValueError(
                f"{TOKENS_KEY}: expected at most {len(places)} versions for as many tokens, got "
                f"{len(own)}; give those of the same conversation"
            )
        row[places[len(places) - len(own) :]] = own
    return versions
