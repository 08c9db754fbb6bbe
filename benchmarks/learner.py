"""A trainer that learns from the dialogs of a collector, and sends it each step's weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fusedrl import token_log_probs

from .collector_parts import chats, generating


class Learner:
    """Each call takes so many batches, with an optimiser step and an update each.

    Args:
        collect: makes the collector of an environment, a policy and options.
        rows: dialogs at a time; a batch has two of each.
        tokens: in an answer.
        batches: in a call.
        remember: keep the weights of each version.
    """

    def __init__(
        self,
        collect: Callable[..., Any],
        rows: int,
        tokens: int,
        batches: int,
        remember: bool = False,
    ):
        policy = generating(tokens)
        self.trained: Any = generating(tokens)
        self.weights = TensorDict.from_module(self.trained).data
        self.optimizer = torch.optim.AdamW(self.trained.model.parameters(), lr=1e-3)
        self.collector = collect(
            partial(chats, rows), policy, frames_per_batch=4 * rows, track_policy_version=True
        )
        self.batches, self.count = iter(self.collector), batches
        self.remember, self.versions = remember, [self.weights.clone()]
        self.first: int | None = None  # the number of the first version

    def __call__(self, _: Any) -> list[Any]:
        """The turns of the batches."""
        turns: list[Any] = []
        for _ in range(self.count):
            batch = next(self.batches).reshape(-1).unbind(0)
            loss = -torch.cat(self._log_probs(batch)).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.collector.update_policy_weights_(self.weights)
            if self.remember:
                self.versions.append(self.weights.clone())
            turns += batch
        return turns

    def of_another_version(self, turns: Sequence[Any]) -> Tensor:
        """How many turns have log-probs that the weights of their version do not give."""
        tags = [int(turn["next", "policy_version"]) for turn in turns]
        self.first = tags[0] if self.first is None else self.first
        wrong = 0
        for turn, tag in zip(turns, tags, strict=True):
            with torch.no_grad(), self.versions[tag - self.first].to_module(self.trained):
                (expected,) = self._log_probs([turn])
            # torchrl has 0 for the first token of an answer.
            difference = (turn["log_probs", "response"] - expected)[1:].abs().max()
            wrong += bool(difference > 1e-3)
        return torch.tensor(float(wrong), dtype=torch.float64)

    def _log_probs(self, turns: Sequence[Any]) -> list[Tensor]:
        """Those of each turn's answer."""
        tokens = [turn["tokens", "full"] for turn in turns]
        starts = [
            len(x) - len(turn["tokens", "response"]) for x, turn in zip(tokens, turns, strict=True)
        ]
        padded = pad_sequence(tokens, batch_first=True)  # on the right: no token sees it
        logits = self.trained.model(input_ids=padded, use_cache=False).logits
        log_probs = token_log_probs(logits, padded, shift=True).log_probs
        return [
            row[start : len(x)] for row, start, x in zip(log_probs, starts, tokens, strict=True)
        ]

    def close(self) -> None:
        """End the worker."""
        self.collector.shutdown()
