"""``WithoutAdapters``: the base of a LoRA policy, as the policy's own reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fusedrl.models import WithoutAdapters, causal_log_probs

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import definition, model_of

peft = pytest.importorskip("peft")


def adapted(model: Any, **options: Any) -> Any:
    """A policy whose adapters change its answers."""
    config = peft.LoraConfig(
        **{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **options}
    )
    return peft.get_peft_model(copy.deepcopy(model), config)


@pytest.mark.parametrize("train", [False, True])
def test_log_probs_are_those_of_the_base_model(train):
    base = model_of("qwen2")
    policy = adapted(base, lora_dropout=0.5).train(train)
    expected = definition(base, TOKENS, LENGTHS, MASK)
    close(causal_log_probs(WithoutAdapters(policy), TOKENS, LENGTHS, MASK).log_probs, expected)
    with_adapters = causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs
    assert (with_adapters - expected).abs().max() > 0.1
    assert with_adapters.requires_grad


def test_the_policy_is_as_it_was_afterwards():
    policy = adapted(model_of("qwen2"))
    next(p for n, p in policy.named_parameters() if "lora_A" in n).requires_grad_(False)
    before = [p.requires_grad for p in policy.parameters()]
    scored = causal_log_probs(policy, TOKENS, LENGTHS).log_probs
    reference = WithoutAdapters(policy)
    causal_log_probs(reference, TOKENS, LENGTHS)
    assert [p.requires_grad for p in policy.parameters()] == before
    close(causal_log_probs(policy, TOKENS, LENGTHS).log_probs, scored)
    with pytest.raises(TypeError):
        reference("no tokens")
    assert [p.requires_grad for p in policy.parameters()] == before
    close(causal_log_probs(policy, TOKENS, LENGTHS).log_probs, scored)


def test_merged_adapters_are_refused_and_stay_merged():
    policy = adapted(model_of("qwen2"))
    policy.merge_adapter()
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="adapted: expected adapters beside the weights, got me"):
        causal_log_probs(WithoutAdapters(policy), TOKENS, LENGTHS)
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradients_with_checkpointing_are_those_without(use_reentrant):
    """A backward pass that recomputes the reference would do so with the adapters enabled."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = adapted(model_of("qwen2")).train()
        policy.enable_input_require_grads()
        if checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        log_ratio = (
            causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs
            - causal_log_probs(WithoutAdapters(policy), TOKENS, LENGTHS, MASK).log_probs
        )
        log_ratio.square().sum().backward()
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-3)


def test_adapters_of_transformers_itself():
    model = model_of("qwen2")
    expected = definition(model, TOKENS, LENGTHS, MASK)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
    close(out, definition(model, TOKENS, LENGTHS, MASK))
    assert (out - expected).abs().max() > 0.1


def test_a_model_without_adapters_is_refused():
    with pytest.raises(TypeError, match=r"adapted: expected a peft model .* got Qwen2ForCausalLM"):
        WithoutAdapters(model_of("qwen2"))


@pytest.mark.parametrize(
    "config",
    [
        peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False),
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_adapters_outside_of_the_decoder_count(config):
    policy = peft.get_peft_model(model_of("qwen2"), config).eval()
    out = causal_log_probs(policy, TOKENS, LENGTHS).log_probs
    row = TOKENS[:17]
    logits = policy(row[None], torch.ones(1, 17)).logits[0, -17:-1]
    expected = logits.log_softmax(-1).gather(-1, row[1:, None]).squeeze(-1)
    close(out[1:17], expected)
