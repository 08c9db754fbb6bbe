"""causal_scores: what two models give the tokens of sequences that neither of them wrote."""

from __future__ import annotations

import copy

import pytest
import torch
from models.tiny import VOCAB, model_of

from fusedrl.models.divergences import causal_scores

LENGTHS = [9, 1, 14, 2, 6]
TOKENS = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(len(TOKENS), generator=torch.Generator().manual_seed(2)) < 0.6


def definition(policy, reference, temperature=1.0, classes=None):
    """Sequence by sequence in float64, from all logits."""
    columns = torch.zeros(6, len(TOKENS), dtype=torch.float64)
    start = 0
    for length in LENGTHS:
        ids = TOKENS[start : start + length]
        log_p, log_q = (
            torch.log_softmax(
                copy.deepcopy(model).double()(ids[None]).logits[0, :-1, :classes] / temperature, -1
            )
            for model in (policy, reference)
        )
        p, q = log_p.exp(), log_q.exp()
        at = ids[1:, None]
        columns[:, start + 1 : start + length] = torch.stack(
            [
                log_p.gather(1, at)[:, 0],
                -(p * log_p).sum(-1),
                log_q.gather(1, at)[:, 0],
                -(q * log_q).sum(-1),
                (p * (log_p - log_q)).sum(-1),
                (q * (log_q - log_p)).sum(-1),
            ]
        )
        start += length
    return columns * MASK


def columns_of(scores):
    return torch.stack([*scores.policy, *scores.reference, *scores.kl])


@pytest.mark.parametrize(
    ("kind", "other", "options"),
    [
        ("llama", "qwen2", {}),
        ("gemma2", "llama", {"temperature": 0.7}),
        ("granite", "opt", {}),  # one of which does not come apart
        ("opt", "llama", {"temperature": 1.3, "max_tokens_per_forward": 12}),
    ],
)
@torch.no_grad()
def test_equals_float64_from_all_logits(kind, other, options):
    models = model_of(kind), model_of(other)
    scores = causal_scores(
        *models, TOKENS, LENGTHS, MASK, directions=("reverse", "forward"), **options
    )
    expected = definition(*models, options.get("temperature", 1.0))
    torch.testing.assert_close(columns_of(scores).double(), expected, rtol=0, atol=1e-5)
    assert expected[4].max() > 0.1
    assert not columns_of(scores)[:, ~MASK].any()


@pytest.mark.parametrize("kinds", [("llama", "qwen2"), ("opt", "llama")])
@torch.no_grad()
def test_a_head_with_more_rows_than_there_are_classes(kinds):
    """Padding of a vocabulary, which is another number of rows in each model."""
    models = (
        [model_of(kind, vocab_size=VOCAB + 8 * n) for n, kind in enumerate(kinds, 1)]
        if ("opt" not in kinds)
        else [model_of("opt"), model_of("llama", vocab_size=VOCAB + 8)]
    )
    scores = causal_scores(
        *models, TOKENS, LENGTHS, MASK, directions=("reverse", "forward"), classes=VOCAB
    )
    expected = definition(*models, classes=VOCAB)
    torch.testing.assert_close(columns_of(scores).double(), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_a_model_beside_itself_has_no_divergence():
    model = model_of("qwen2")
    scores = causal_scores(model, model, TOKENS, LENGTHS, MASK, directions=("reverse", "forward"))
    assert scores.kl[0].abs().max() <= 1e-6 and scores.kl[1].abs().max() <= 1e-6
    assert torch.equal(scores.policy.log_probs, scores.reference.log_probs)


@torch.no_grad()
def test_k1_of_sampled_answers_is_the_exact_divergence_on_average():
    """And on tokens that the policy has not sampled it is not."""
    policy, reference = model_of("llama"), model_of("qwen2")
    answers, generator = torch.full((10_000, 1), 5), torch.Generator().manual_seed(3)
    for _ in range(4):
        probs = policy(answers).logits[:, -1].softmax(-1)
        answers = torch.cat([answers, torch.multinomial(probs, 1, generator=generator)], 1)
    scores = causal_scores(policy, reference, answers.flatten(), [5] * len(answers))
    of_answers = (scores.policy.log_probs - scores.reference.log_probs).view(-1, 5).sum(1)
    exact = scores.kl[0].view(-1, 5).sum(1)
    error = (of_answers - exact).std() / len(answers) ** 0.5
    assert abs(of_answers.mean() - exact.mean()) <= 3 * error < 0.1 * exact.mean()
    scores = causal_scores(policy, reference, TOKENS, LENGTHS)
    k1 = scores.policy.log_probs - scores.reference.log_probs
    assert abs(k1.mean() - scores.kl[0].mean()) > 0.5 * scores.kl[0].mean()


def test_no_token_to_score():
    models = model_of("llama"), model_of("qwen2")
    nothing = torch.zeros_like(MASK)
    assert not columns_of(causal_scores(*models, TOKENS, LENGTHS, nothing)).any()
    models = model_of("opt"), model_of("qwen2")
    assert not columns_of(causal_scores(*models, TOKENS, LENGTHS, nothing)).any()


def test_a_sequence_that_one_of_the_models_has_no_positions_for_is_refused():
    """Also where the models compute their logits: on a GPU such an index ends the process."""
    short, long = model_of("opt"), model_of("llama", max_position_embeddings=128)
    tokens = torch.zeros(80, dtype=torch.int64)
    for models in ((short, long), (long, short), (short, short)):
        with pytest.raises(ValueError, match="expected at most 64 tokens, the model's context"):
            causal_scores(*models, tokens, [80])
