"""A real gap: a bf16 copy of a model generates, the float32 model trains, and weights correct it.

All answers of two tokens are enumerated, with the probability that the copy samples each with, so
that a bias shows without the noise of a sample.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from fusedrl import importance_weights
from fusedrl.models import causal_log_probs

from .tiny import model_of

CLASSES = 40
PROMPT = torch.tensor([1, 7, 3, 9])


class Answers(NamedTuple):
    """Every answer of two tokens: its log-probs in both models, and a reward."""

    model: torch.nn.Module
    policy: Tensor  # [N, 6], with a graph
    rollout: Tensor
    mask: Tensor
    reward: Tensor

    def probability(self, log_probs: Tensor) -> Tensor:
        return log_probs.detach().double().sum(1).exp()

    def mean(self, weights: Tensor) -> float:
        """The mean reward that weighted samples of the copy tend to, the weights a token's mean."""
        of_answer = weights.double().sum(1) / self.mask.sum(1)
        return (self.probability(self.rollout) * of_answer * self.reward).sum().item()

    def gradient(self, weights: Tensor, probability: Tensor) -> Tensor:
        """The policy gradient that as many samples as there are tend to."""
        of_token = (probability * self.reward)[:, None] * weights.double() * self.mask
        parameters = [x for x in self.model.parameters() if x.requires_grad]
        grads = torch.autograd.grad((of_token * self.policy).sum(), parameters, retain_graph=True)
        return torch.cat([grad.flatten() for grad in grads])


@pytest.fixture(scope="module")
def answers():
    model = model_of("qwen2", vocab_size=CLASSES)
    engine = copy.deepcopy(model).bfloat16()
    pairs = torch.cartesian_prod(torch.arange(CLASSES), torch.arange(CLASSES))
    tokens = torch.cat([PROMPT.expand(len(pairs), -1), pairs], 1)
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[:, len(PROMPT) :] = True
    batch = (tokens.flatten(), [tokens.shape[1]] * len(tokens), mask.flatten())
    policy = causal_log_probs(model, *batch).view(tokens.shape)
    with torch.no_grad():
        rollout = causal_log_probs(engine, *batch).view(tokens.shape)
    first, second = pairs.double().unbind(1)
    reward = (1.7 * first).sin() + (0.9 * second).cos() * first.sin()
    return Answers(model, policy, rollout, mask, reward)


def test_the_models_differ_as_precisions_do(answers):
    total = importance_weights(answers.policy, answers.rollout, answers.mask).mismatch.total()
    assert 1e-5 < total.k3 < 1e-2
    assert 1.01 < total.max_ratio < 2
    for log_probs in (answers.policy, answers.rollout):
        assert answers.probability(log_probs).sum().item() == pytest.approx(1, abs=1e-3)


def test_weighted_means_are_closer_to_the_exact_one(answers):
    exact = (answers.probability(answers.policy) * answers.reward).sum().item()
    error = {"none": abs(answers.mean(answers.mask) - exact)}
    for level in ("token", "geometric", "sequence"):
        weights = importance_weights(
            answers.policy, answers.rollout, answers.mask, level=level
        ).weights
        error[level] = abs(answers.mean(weights) - exact)
    assert error["sequence"] < 1e-4 * error["none"]
    assert max(error["token"], error["geometric"]) < 0.7 * error["none"]


def test_weighted_gradients_are_closer_to_the_exact_one(answers):
    exact = answers.gradient(answers.mask, answers.probability(answers.policy))
    rollout = answers.probability(answers.rollout)

    def error(weights):
        return ((answers.gradient(weights, rollout) - exact).norm() / exact.norm()).item()

    of = {
        level: error(
            importance_weights(answers.policy, answers.rollout, answers.mask, level=level).weights
        )
        for level in ("token", "geometric", "sequence")
    }
    unweighted = error(answers.mask)
    assert unweighted > 1e-2
    assert of["sequence"] < 1e-4 * unweighted
    assert of["token"] < 0.4 * unweighted
    assert of["geometric"] < 0.7 * unweighted


def test_weights_of_a_sample_tell_the_bias_of_its_mean(answers):
    """What weights add to the mean of 400000 sampled answers is what the mean lacks."""
    generator = torch.Generator().manual_seed(0)
    rollout = answers.probability(answers.rollout)
    drawn = torch.multinomial(rollout, 400_000, replacement=True, generator=generator)
    batch = (answers.policy.detach()[drawn], answers.rollout[drawn], answers.mask[drawn])
    weights = importance_weights(*batch, level="sequence").weights[:, -1].double()
    added = (weights - 1) * answers.reward[drawn]
    exact = (answers.probability(answers.policy) * answers.reward).sum()
    bias = exact - (rollout * answers.reward).sum()
    uncertainty = added.std() / len(added) ** 0.5
    assert abs(bias) > 10 * uncertainty
    assert abs(added.mean() - bias) < 4 * uncertainty
