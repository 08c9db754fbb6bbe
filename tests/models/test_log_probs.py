"""``causal_log_probs``: the log-probs of each sequence alone, however they share a forward."""

from __future__ import annotations

import copy

import pytest
import torch
from watching import Watch

from fusedrl.models import capabilities, causal_log_probs, log_probs
from fusedrl.models.divergences import causal_divergences
from fusedrl.models.split import TESTED
from fusedrl.ops.token_log_probs import TokenLogProbs

from .tiny import PACKING, VOCAB, counted, definition, model_of

LENGTHS = [17, 3, 1, 0, 9, 25]
N = sum(LENGTHS)
TOKENS = torch.randint(0, VOCAB, (N,), generator=torch.Generator().manual_seed(1))
MASK = torch.rand(N, generator=torch.Generator().manual_seed(2)) < 0.5


def close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_every_type_that_packs_is_tested():
    assert set(PACKING) == TESTED


@pytest.mark.parametrize("kind", [*PACKING, "opt", "gpt2", "mamba"])
@pytest.mark.parametrize("mask", [MASK, None])
def test_log_probs_are_those_of_each_sequence_alone(kind, mask):
    model = model_of(kind)
    assert (capabilities.capabilities_of(model).parts is not None) == (kind in PACKING)
    with torch.no_grad():
        expected = definition(model, TOKENS, LENGTHS, mask)
        for limit in (None, 20):
            close(
                causal_log_probs(
                    model, TOKENS, LENGTHS, mask, max_tokens_per_forward=limit
                ).log_probs,
                expected,
            )


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_eager_attention_packs(kind):
    model = model_of(kind, attention="eager")
    assert capabilities.capabilities_of(model).parts is not None
    close(
        causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs,
        definition(model, TOKENS, LENGTHS, MASK),
    )


def test_temperature_and_entropy():
    model = model_of("llama")
    both = causal_log_probs(model, TOKENS, LENGTHS, MASK, temperature=2.0, entropy=True)
    assert isinstance(both, TokenLogProbs)
    logits = model(input_ids=TOKENS[None, :17]).logits[0, :-1] / 2
    full = logits.log_softmax(-1)
    entropy = -(full.exp() * full).sum(-1) * MASK[1:17]
    picked = full.gather(-1, TOKENS[1:17, None]).squeeze(-1) * MASK[1:17]
    close(both.entropy[1:17], entropy)
    close(both.log_probs[1:17], picked)


@pytest.mark.parametrize("kind", ["qwen2", "opt"])
def test_gradients_are_those_of_each_sequence_alone(kind):
    weights = torch.randn(N, generator=torch.Generator().manual_seed(3))
    grads = []
    for compute in (causal_log_probs, definition):
        model = model_of(kind)
        found = compute(model, TOKENS, LENGTHS, MASK)
        found = found.log_probs if isinstance(found, TokenLogProbs) else found
        (found * weights).sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        close(grad, grads[1][name], 1e-4)


def test_nothing_behind_the_last_kept_token_is_computed():
    model = model_of("llama")
    seen = []
    model.model.embed_tokens.register_forward_hook(Watch(lambda _, args, out: seen.append(args[0])))
    causal_log_probs(model, TOKENS, LENGTHS)  # the comparison
    seen.clear()
    mask = torch.zeros(N, dtype=torch.bool)
    mask[[5, 30]] = True  # in the first and the last of the sequences
    causal_log_probs(model, TOKENS, LENGTHS, mask)
    assert [ids.tolist() for ids in seen] == [[TOKENS[:5].tolist()]]


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_nothing_to_score_computes_one_token_and_has_a_gradient_of_zero(kind):
    model = model_of(kind)
    nothing = torch.zeros(N, dtype=torch.bool)
    causal_log_probs(model, TOKENS, LENGTHS)  # the comparison
    seen = counted(model)
    out = causal_log_probs(model, TOKENS, LENGTHS, nothing).log_probs
    assert out.shape == (N,) and not out.any() and seen == [1]
    out.sum().backward()
    assert not any(x.grad.any() for x in model.parameters() if x.grad is not None)
    empty = causal_log_probs(model, TOKENS[:0], [], entropy=True)
    assert [len(values) for values in empty] == [0, 0]


def test_divergences_of_nothing_are_zero():
    nothing = torch.zeros(N, dtype=torch.bool)
    out = causal_divergences(model_of("llama"), model_of("qwen2"), TOKENS, LENGTHS, nothing)
    assert out.shape == (N,) and not out.any()


@pytest.mark.parametrize("limit", [1, 12, 30, 1000])
def test_a_forward_takes_no_more_tokens_than_allowed(limit):
    for kind in ("llama", "opt"):
        model = model_of(kind)
        seen = counted(model)
        causal_log_probs(model, TOKENS, LENGTHS, max_tokens_per_forward=limit)
        assert max(seen) <= max(limit, max(LENGTHS))
        assert len(seen) == 1 or limit < 1000


def test_bfloat16_rounds_hidden_states_alone():
    model = model_of("qwen2").bfloat16()
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
    exact = definition(copy.deepcopy(model).float(), TOKENS, LENGTHS, MASK)
    rounded = definition(model, TOKENS, LENGTHS, MASK)
    assert out.dtype == torch.float32
    assert (out - exact).abs().mean() < (rounded - exact).abs().mean()


def test_autocast_computes_as_the_model_would():
    model = model_of("qwen2")
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
    assert out.dtype == torch.float32
    close(out, definition(model, TOKENS, LENGTHS, MASK), 0.2)


def test_the_head_multiplies_kept_rows_alone(monkeypatch):
    seen = []

    def recording(hidden, *arguments, **options):
        seen.append(len(hidden))
        return original(hidden, *arguments, **options)

    original = log_probs.linear_token_log_probs
    monkeypatch.setattr(log_probs, "linear_token_log_probs", recording)
    causal_log_probs(model_of("llama"), TOKENS, LENGTHS, MASK)
    firsts = torch.tensor([0, 17, 20, 21, 30])
    assert seen == [int(MASK.sum() - MASK[firsts].sum())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PACKING)
@torch.no_grad()
def test_types_that_pack_do_so_in_half_precision(kind, dtype):
    found = capabilities.capabilities_of(model_of(kind).to(dtype))
    assert found.parts is not None and found.shares
