"""A bf16 engine generates for a float32 trainer: how far apart they are, and what corrects it.

The responses are so short, and of so few tokens, that the gradient is known exactly.
"""

import itertools

import pytest
import torch
from tiny_engines import offline, tiny_model

from fusedrl import importance_weights

pytestmark = pytest.mark.slow

VOCABULARY, LENGTH, SAMPLES = 8, 2, 16000
PROMPTS = [[2, 3, 4], [5, 6], [7, 2, 5, 3], [4, 4]]
RESPONSES = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
BATCHES = 20


@pytest.fixture(scope="module")
def model(folder):
    model = tiny_model(folder, vocab_size=VOCABULARY, num_hidden_layers=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def rollouts(folder, model):
    """Of each prompt, which of the responses were sampled and the engine's log-probs of them."""
    from vllm import SamplingParams

    settings = SamplingParams(
        max_tokens=LENGTH, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    with offline(folder, dtype="bfloat16") as llm:
        prompts = [{"prompt_token_ids": p} for p in PROMPTS for _ in range(SAMPLES)]
        answers = [r.outputs[0] for r in llm.generate(prompts, settings, use_tqdm=False)]
    tokens = torch.tensor([list(answer.token_ids) for answer in answers])
    log_probs = torch.tensor(
        [
            [entry[t].logprob for entry, t in zip(a.logprobs, a.token_ids, strict=True)]
            for a in answers
        ]
    )
    index = (tokens * VOCABULARY ** torch.arange(LENGTH - 1, -1, -1)).sum(-1)
    return index.view(len(PROMPTS), -1), log_probs.view(len(PROMPTS), -1, LENGTH)


@pytest.fixture(scope="module")
def policy(model):
    """The trainer's log-probs of all responses to each prompt, by token, with their graphs."""

    def scored(prompt):
        ids = torch.cat([torch.tensor([prompt]).expand(len(RESPONSES), -1), RESPONSES], 1)
        log_probs = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
        return log_probs.gather(-1, RESPONSES[..., None])[..., 0]

    return torch.stack([scored(prompt) for prompt in PROMPTS])


@pytest.fixture(scope="module")
def rewards():
    return torch.randn(len(RESPONSES), generator=torch.Generator().manual_seed(0))


def sampled_tokens(rollouts, policy):
    """Both log-probs of each sampled token: the trainer's and the engine's."""
    index, engine = rollouts
    trainer = torch.stack([p[i] for p, i in zip(policy.detach(), index, strict=True)])
    return trainer, engine


def sequence_weights(trainer, engine):
    offsets = torch.arange(0, trainer.numel() + 1, LENGTH)
    weights, mismatch = importance_weights(
        trainer.flatten(), engine.flatten(), offsets=offsets, level="sequence", high=None
    )
    return weights.view(trainer.shape)[..., 0], mismatch


def gradient(value, model):
    parts = torch.autograd.grad(value, list(model.parameters()), retain_graph=True)
    return torch.cat([part.flatten() for part in parts])


def test_the_engine_samples_from_another_policy(rollouts, policy):
    trainer, engine = sampled_tokens(rollouts, policy)
    difference = (trainer - engine).abs()
    ratios = (trainer - engine).sum(-1).exp()
    print(
        f"mean |difference| {difference.mean():.4f} nats per token, sequence ratios "
        f"{ratios.min():.2f} to {ratios.max():.2f}"
    )
    assert 0.005 < difference.mean() < 0.5
    # The ratios of a policy's own samples are 1 on average, whatever they are one by one.
    assert (ratios.mean() - 1).abs() < 4 * ratios.std() / ratios.numel() ** 0.5
    _, mismatch = sequence_weights(trainer, engine)
    torch.testing.assert_close(mismatch.max_ratio.max(), ratios.max())


def test_weights_correct_the_gradient(rollouts, policy, rewards, model):
    exact = gradient((policy.sum(-1).exp() * rewards).sum(-1).mean(), model)
    trainer, engine = sampled_tokens(rollouts, policy)
    weights, _ = sequence_weights(trainer, engine)
    index, _ = rollouts

    def estimate(weights, batch=slice(None)):
        chosen = index[:, batch]
        scored = policy.sum(-1).gather(1, chosen)
        return gradient((weights[:, batch] * rewards[chosen] * scored).mean(), model)

    plain = (estimate(torch.ones_like(weights)) - exact).norm()
    corrected = (estimate(weights) - exact).norm()
    batches = [estimate(weights, slice(i, None, BATCHES)) for i in range(BATCHES)]
    noise = (torch.stack(batches).var(0).sum() / BATCHES).sqrt()
    print(
        f"gradient {exact.norm():.2f}: off by {plain:.3f} as sampled, by {corrected:.3f} "
        f"corrected; samples alone {noise:.3f}"
    )
    assert corrected < 0.6 * plain
    assert corrected < 1.8 * noise  # nothing but the noise of samples is left
