"""Batches of chats through both models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from fusedrl.ops import token_kl, token_log_probs
from fusedrl.ops.token_log_probs import TokenLogProbs
from fusedrl.scoring.masks import TokenizedChat
from fusedrl.scoring.models import ModelPair


class ScoredChat(NamedTuple):
    """One chat with float32 arrays over its scored tokens, in nats.

    ``positions`` indexes ``tokenized.token_ids``; ``kl`` holds each estimator's values by name.
    """

    tokenized: TokenizedChat
    positions: numpy.ndarray
    policy: numpy.ndarray
    reference: numpy.ndarray
    entropy: numpy.ndarray
    kl: dict[str, numpy.ndarray]


def batches(
    chats: Sequence[TokenizedChat], max_tokens_per_batch: int
) -> Iterator[list[TokenizedChat]]:
    """Chats of similar length together: longest first; one beyond the limit goes alone."""
    batch: list[TokenizedChat] = []
    for chat in sorted(chats, key=lambda c: len(c.token_ids), reverse=True):
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > max_tokens_per_batch:
            yield batch
            batch = []
        batch.append(chat)
    if batch:
        yield batch


@torch.inference_mode()
def score_batch(
    models: ModelPair,
    batch: Sequence[TokenizedChat],
    estimators: Sequence[str],
    temperature: float = 1.0,
) -> list[ScoredChat]:
    """Log-probs of both models, the policy's entropy and the KL of every scored token."""
    tokens, mask, attention = (
        pad_sequence(rows, batch_first=True).to(models.device)
        for rows in (
            [torch.tensor(chat.token_ids) for chat in batch],
            [torch.tensor(chat.turns) >= 0 for chat in batch],
            [torch.ones(len(chat.token_ids), dtype=torch.int64) for chat in batch],
        )
    )
    policy = _log_probs(models.policy, tokens, mask, attention, temperature)
    reference = _log_probs(models.reference, tokens, mask, attention, temperature)
    columns = {
        "policy": policy.log_probs,
        "reference": reference.log_probs,
        "entropy": policy.entropy,
    }
    for estimator in estimators:
        columns[estimator] = token_kl(
            policy.log_probs, reference.log_probs, mask, estimator=estimator
        )
    arrays = {name: column.cpu().numpy() for name, column in columns.items()}
    scored = []
    for row, chat in enumerate(batch):
        positions = numpy.flatnonzero(numpy.asarray(chat.turns) >= 0)
        own = {name: array[row, positions] for name, array in arrays.items()}
        kl = {estimator: own.pop(estimator) for estimator in estimators}
        scored.append(ScoredChat(chat, positions, kl=kl, **own))
    return scored


def _log_probs(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, attention: Tensor, temperature: float
) -> TokenLogProbs:
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
    result = token_log_probs(
        logits, tokens, mask, shift=True, temperature=temperature, entropy=True
    )
    assert isinstance(result, TokenLogProbs)
    return result
