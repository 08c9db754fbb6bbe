"""causal_policy_terms: the terms of a loss, whichever way a model's log-probs are computed."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from fusedrl.models import causal_log_probs
from fusedrl.models.policy_terms import causal_policy_terms
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights
from fusedrl.ops.linear_policy_loss.reference import policy_terms

from .tiny import VOCAB, config_of

LENGTHS = [9, 1, 14, 0, 5]
SURROGATE = Surrogate("clip", 0.8, 1.2, float("inf"), "k3")
FACTORS = torch.tensor([1.0, 2.0, -0.5, 3.0])


def model_of(kind: str):
    torch.manual_seed(0)
    config = config_of(kind)
    config.initializer_range = 0.2
    return AutoModelForCausalLM.from_config(config).eval()


def batch(total: int):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCAB, (total,), generator=generator)
    mask = torch.rand(total, generator=generator) < 0.6
    advantages, old, ref, *weights = torch.randn(7, total, generator=generator)
    firsts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    scored = mask.clone()
    scored[firsts[firsts < total]] = False
    weights = [torch.where(scored, weight.abs() / total, 0) for weight in weights]
    data = PolicyBatch(advantages, old - 4, ref - 4)
    return tokens, mask, data, TermWeights(*weights)


def reference(model, tokens, mask, data, weights):
    """From log-probs that differentiate."""
    scored = causal_log_probs(model, tokens, LENGTHS, mask, entropy=True)
    return policy_terms(scored.log_probs, scored.entropy, data, weights, SURROGATE)


# Parts that pack and that are padded, a head of more than a product, and one that is not split.
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "granite", "gpt2", "opt"])
@pytest.mark.parametrize("factors", [torch.ones(4), FACTORS], ids=["one factor", "factors"])
def test_values_and_gradients(kind, factors):
    model = model_of(kind)
    exact = copy.deepcopy(model).double()
    tokens, mask, data, weights = batch(sum(LENGTHS))
    terms = causal_policy_terms(
        model, tokens, LENGTHS, mask, data, weights, SURROGATE, entropy=True
    )
    truth = reference(exact, tokens, mask, data, weights)
    torch.testing.assert_close(terms.values.double(), truth, rtol=1e-5, atol=1e-5)
    (terms.values * factors).sum().backward()
    (truth * factors).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        size = theirs.grad.abs().max()
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * size + 1e-6, name
    scored = causal_log_probs(model, tokens, LENGTHS, mask, entropy=True)
    torch.testing.assert_close(terms.log_probs, scored.log_probs.detach())
    torch.testing.assert_close(terms.entropy, scored.entropy.detach())


def test_nothing_of_tokens_that_do_not_count_is_read():
    model = model_of("qwen2")
    tokens, mask, data, weights = batch(sum(LENGTHS))
    spoiled = PolicyBatch(*(torch.where(mask, column, torch.nan) for column in data))
    plain, nans = (
        causal_policy_terms(model, tokens, LENGTHS, mask, given, weights, SURROGATE)
        for given in (data, spoiled)
    )
    assert torch.equal(plain.values, nans.values)
    assert torch.equal(plain.entropy, torch.zeros(sum(LENGTHS)))


@pytest.mark.parametrize("lengths", [[], [3], [1, 1]])
def test_nothing_that_counts(lengths):
    total = sum(lengths)
    tokens, zeros = torch.zeros(total, dtype=torch.int64), torch.zeros(total)
    mask = torch.zeros(total, dtype=torch.bool)
    data, weights = PolicyBatch(zeros, zeros, None), TermWeights(zeros)
    terms = causal_policy_terms(model_of("qwen2"), tokens, lengths, mask, data, weights, SURROGATE)
    assert torch.equal(terms.values, torch.zeros(4)) and len(terms.log_probs) == total
