"""The scores of a batch of chats: log-probs of both models, entropy and KL of each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch

from fusedrl.models import causal_log_probs
from fusedrl.ops import Mismatch, importance_weights, token_kl
from fusedrl.scoring.pretrained import ModelPair
from fusedrl.scoring.settings import Settings
from fusedrl.scoring.tokenization import TokenizedChat


class ScoredChat(NamedTuple):
    """One chat with float32 arrays over its scored tokens, in nats.

    ``positions`` indexes ``tokenized.token_ids``; ``kl`` holds each estimator's values by name.
    ``rollout`` has the log-probs of the engine that generated the chat, NaN where they are not
    known, and ``mismatch`` says how far the policy is from it; both are ``None`` without these.
    """

    tokenized: TokenizedChat
    positions: numpy.ndarray
    policy: numpy.ndarray
    reference: numpy.ndarray
    entropy: numpy.ndarray
    kl: dict[str, numpy.ndarray]
    rollout: numpy.ndarray | None = None
    mismatch: Mismatch | None = None


@torch.inference_mode()
def score_batch(
    models: ModelPair, batch: Sequence[TokenizedChat], settings: Settings
) -> list[ScoredChat]:
    """Compute both models' log-probs, the policy's entropy and the KL of every scored token."""
    lengths = [len(chat.token_ids) for chat in batch]
    tokens = torch.tensor([token for chat in batch for token in chat.token_ids])
    turns = torch.tensor([turn for chat in batch for turn in chat.turns])
    options = {
        "max_tokens_per_forward": settings.max_tokens_per_batch,
        "temperature": settings.temperature,
    }
    policy = causal_log_probs(models.policy, tokens, lengths, turns >= 0, entropy=True, **options)
    reference = causal_log_probs(models.reference, tokens, lengths, turns >= 0, **options).log_probs
    assert policy.entropy is not None
    columns = {"policy": policy.log_probs, "reference": reference, "entropy": policy.entropy}
    estimators = sorted({"k1", "k3", settings.estimator})
    for estimator in estimators:
        columns[estimator] = token_kl(policy.log_probs, reference, estimator=estimator).kl
    arrays = {name: column.cpu().split(lengths) for name, column in columns.items()}
    scored = []
    for i, chat in enumerate(batch):
        positions = numpy.flatnonzero(numpy.asarray(chat.turns) >= 0)
        own = {name: rows[i].numpy()[positions] for name, rows in arrays.items()}
        kl = {estimator: own.pop(estimator) for estimator in estimators}
        made = ScoredChat(chat, positions, own["policy"], own["reference"], own["entropy"], kl)
        bound = settings.rollout_bound
        scored.append(made if chat.rollout is None else _beside_rollout(made, bound))
    return scored


def _beside_rollout(scored: ScoredChat, bound: float) -> ScoredChat:
    """A copy of a chat with its mismatch, for ratios of tokens that are truncated at ``bound``.

    Only tokens that the engine did not report are left out. A NaN of the policy makes the mismatch
    NaN, so that it is seen.
    """
    rollout = torch.tensor(scored.tokenized.rollout, dtype=torch.float32)
    known = ~rollout.isnan()
    weighed = importance_weights(torch.from_numpy(scored.policy), rollout, known, high=bound)
    return scored._replace(rollout=rollout.numpy(), mismatch=weighed.mismatch)
