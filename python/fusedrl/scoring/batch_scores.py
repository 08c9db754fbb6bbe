"""Score a batch of chats: per-token log-probs and entropies of both models, and their KL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy
import torch

from fusedrl.models.divergences import causal_scores
from fusedrl.ops import Mismatch, importance_weights, token_kl
from fusedrl.scoring.pretrained import ModelPair
from fusedrl.scoring.settings import ESTIMATORS, Settings
from fusedrl.scoring.tokenization import TokenizedChat


class ScoredChat(NamedTuple):
    """One chat with float32 arrays over its scored tokens, in nats.

    ``positions`` indexes ``tokenized.token_ids``. ``kl`` maps ``exact`` and ``forward`` (if
    computed), ``k1`` and ``k3`` to values, with the chosen quantity first. ``rollout`` has the
    log-probs of the engine that generated the chat, NaN where it reported none, and ``mismatch``
    compares the policy with it; both are ``None`` without rollout log-probs.
    """

    tokenized: TokenizedChat
    positions: numpy.ndarray
    policy: numpy.ndarray
    reference: numpy.ndarray
    entropy: numpy.ndarray
    reference_entropy: numpy.ndarray
    kl: dict[str, numpy.ndarray]
    rollout: numpy.ndarray | None = None
    mismatch: Mismatch | None = None

    @property
    def chosen_kl(self) -> numpy.ndarray:
        """The KL that ranks chats."""
        return next(iter(self.kl.values()))


@torch.inference_mode()
def score_batch(
    models: ModelPair, batch: Sequence[TokenizedChat], settings: Settings
) -> list[ScoredChat]:
    """Compute log-probs and entropies of both models and the KL of every scored token."""
    lengths = [len(chat.token_ids) for chat in batch]
    turns = torch.tensor([turn for chat in batch for turn in chat.turns])
    directions = {} if settings.estimator else {"exact": "reverse"}
    directions |= {"forward": "forward"} if settings.forward_kl else {}
    scores = causal_scores(
        *(models.policy, models.reference),
        *(torch.tensor([token for chat in batch for token in chat.token_ids]), lengths, turns >= 0),
        directions=list(directions.values()),
        temperature=settings.temperature,
        classes=models.classes,
        max_tokens_per_forward=settings.max_tokens_per_batch,
    )
    pair = scores.policy.log_probs, scores.reference.log_probs
    kl = dict(zip(directions, scores.kl, strict=True))
    kl |= {estimator: token_kl(*pair, estimator=estimator).kl for estimator in ESTIMATORS}
    first = settings.estimator or "exact"
    kl = {first: kl.pop(first), **kl}
    columns = [*pair, scores.policy.entropy, scores.reference.entropy, *kl.values()]
    arrays = [x.cpu().split(lengths) for x in columns if x is not None]
    scored = []
    for chat, *rows in zip(batch, *arrays, strict=True):
        positions = numpy.flatnonzero(numpy.asarray(chat.turns) >= 0)
        p, q, of_p, of_q, *of_kl = (row.numpy()[positions] for row in rows)
        by_name = dict(zip(kl, of_kl, strict=True))
        made = ScoredChat(chat, positions, p, q, of_p, of_q, by_name)
        bound = settings.rollout_bound
        scored.append(made if chat.rollout is None else _with_mismatch(made, bound))
    return scored


def _with_mismatch(scored: ScoredChat, bound: float) -> ScoredChat:
    """A copy of a chat with its mismatch, with token ratios truncated at ``bound``.

    Only tokens without a rollout log-prob are excluded: a NaN log-prob of the policy makes the
    mismatch NaN, on purpose.
    """
    rollout = torch.tensor(scored.tokenized.rollout, dtype=torch.float32)
    known = ~rollout.isnan()
    weighed = importance_weights(torch.from_numpy(scored.policy), rollout, known, high=bound)
    return scored._replace(rollout=rollout.numpy(), mismatch=weighed.mismatch)
