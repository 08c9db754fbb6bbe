"""A LoRA policy without its adapters, or with another one, as the policy's own reference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from fusedrl.models import WithAdapter, WithoutAdapters, causal_log_probs
from fusedrl.models.divergences import causal_divergences, causal_scores

from .test_log_probs import LENGTHS, MASK, TOKENS, close
from .tiny import definition, model_of

peft = pytest.importorskip("peft")
CHOICES = {"none": WithoutAdapters, "ref": lambda policy: WithAdapter(policy, "ref")}


def lora(**options: Any) -> Any:
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(**{**defaults, **options})


def adapted(model: Any, config: Any = None, ref: Any = None) -> Any:
    """A policy whose adapters, "default" and "ref", change its answers in two ways."""
    policy = peft.get_peft_model(copy.deepcopy(model), config or lora())
    policy.add_adapter("ref", ref or config or lora())
    for name, parameter in policy.named_parameters():
        if ".ref" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return policy.train(model.training)


def alone(policy: Any, choice: str) -> Any:
    """A model of its own that has no other adapter."""
    policy = copy.deepcopy(policy).eval()
    if choice == "none":
        return policy.unload()
    policy.set_adapter(choice)
    for other in set(policy.peft_config) - {choice}:
        policy.delete_adapter(other)
    return policy


def state_of(policy: Any) -> list[Any]:
    """Which adapters are active, where, and what is trained."""
    parts = [getattr(part, "active_adapter", None) for part in policy.modules()]
    active = [names for names in parts if isinstance(names, (str, list))]
    modes = [part.training for part in policy.modules()]
    return [policy.active_adapters, active, modes, [p.requires_grad for p in policy.parameters()]]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_log_probs_are_those_of_a_model_of_its_own(choice, train):
    policy = adapted(model_of("qwen2"), lora(lora_dropout=0.5)).train(train)
    expected = definition(alone(policy, choice), TOKENS, LENGTHS, MASK)
    close(causal_log_probs(CHOICES[choice](policy), TOKENS, LENGTHS, MASK).log_probs, expected)
    own = causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs
    assert (own - expected).abs().max() > 0.1
    assert own.requires_grad


PROMPT = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
KINDS = {
    "LoRA": (lora(), lora(r=8)),
    "DoRA": (lora(), lora(use_dora=True)),
    "a head of the policy": (lora(modules_to_save=["lm_head"]), lora()),
    "a head of the reference": (lora(), lora(modules_to_save=["lm_head"])),
    "some tokens": (lora(trainable_token_indices=[3]), lora(trainable_token_indices=[4])),
    "prompts": (PROMPT, PROMPT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_policy_is_as_it_was_afterwards(kind):
    policy = adapted(model_of("qwen2"), *KINDS[kind])
    next(p for p in policy.parameters() if p.requires_grad).requires_grad_(False)
    before = state_of(policy)
    scored = causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs
    expected = causal_log_probs(alone(policy, "ref"), TOKENS, LENGTHS, MASK).log_probs
    for reference in (WithAdapter(policy, "ref"), WithoutAdapters(policy)):
        found = causal_scores(policy, reference, TOKENS, LENGTHS, MASK)
        close(found.policy.log_probs, scored)
        if isinstance(reference, WithAdapter):
            close(found.reference.log_probs, expected)
        assert state_of(policy) == before
        with pytest.raises((TypeError, AttributeError)):
            reference("no tokens")
        assert state_of(policy) == before
    close(causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs, scored)


def test_several_active_adapters_come_back():
    policy = adapted(model_of("qwen2"))
    policy.add_weighted_adapter(["default", "ref"], [0.3, 0.7], "both", combination_type="linear")
    policy.base_model.set_adapter(["default", "ref"])
    next(part for part in policy.modules() if hasattr(part, "lora_A")).set_adapter([])
    before = state_of(policy)
    scored = causal_log_probs(policy, TOKENS, LENGTHS).log_probs
    for name in ("default", "ref", "both"):
        expected = definition(alone(policy, name), TOKENS, LENGTHS, None)
        close(causal_log_probs(WithAdapter(policy, name), TOKENS, LENGTHS).log_probs, expected)
        assert state_of(policy) == before
    close(causal_log_probs(policy, TOKENS, LENGTHS).log_probs, scored)


@pytest.mark.parametrize("choice", CHOICES)
def test_divergences_are_those_from_a_model_of_its_own(choice):
    policy = adapted(model_of("qwen2"))
    expected = causal_divergences(policy, alone(policy, choice), TOKENS, LENGTHS, MASK)
    found = causal_divergences(policy, CHOICES[choice](policy), TOKENS, LENGTHS, MASK)
    assert found.requires_grad and found.max() > 0.1
    close(found, expected)


@pytest.mark.parametrize("choice", CHOICES)
def test_merged_adapters_are_refused_and_stay_merged(choice):
    policy = adapted(model_of("qwen2"))
    policy.merge_adapter()
    weights = {name: weight.clone() for name, weight in policy.state_dict().items()}
    with pytest.raises(RuntimeError, match="adapted: expected unmerged adapters, got merged"):
        causal_log_probs(CHOICES[choice](policy), TOKENS, LENGTHS)
    for name, weight in policy.state_dict().items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize("config", [lora(), PROMPT], ids=["LoRA", "prompts"])
def test_an_adapter_that_is_off_or_not_there_is_refused(config):
    policy = adapted(model_of("qwen2"), config)
    with pytest.raises(ValueError, match=r"name: expected one of \['default', 'ref'\], got 'sft'"):
        WithAdapter(policy, "sft")
    with policy.disable_adapter(), pytest.raises(RuntimeError, match="adapted: expected enabled"):
        causal_log_probs(WithAdapter(policy, "ref"), TOKENS, LENGTHS)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("choice", CHOICES)
def test_gradients_with_checkpointing_are_those_without(choice, use_reentrant):
    """A backward pass that recomputes the reference would do so with the policy's adapters."""
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        policy = adapted(model_of("qwen2")).train()
        policy.enable_input_require_grads()
        if checkpointing:
            policy.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        log_ratio = (
            causal_log_probs(policy, TOKENS, LENGTHS, MASK).log_probs
            - causal_log_probs(CHOICES[choice](policy), TOKENS, LENGTHS, MASK).log_probs
        )
        log_ratio.square().sum().backward()
        grads.append({n: p.grad for n, p in policy.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-3)


def test_ddp_need_not_see_a_reference(caplog):
    """It has no gradients to average; those of its policy alone would be missed."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    policy = adapted(model_of("qwen2"))
    try:
        wrapper = DistributedDataParallel(policy)
        for model, warnings in ((WithAdapter(wrapper.module, "ref"), 0), (policy, 1)):
            causal_log_probs(model, TOKENS, LENGTHS)
            assert caplog.text.count("does not see this call") == warnings
    finally:
        distributed.destroy_process_group()


def test_adapters_of_transformers_itself():
    model = model_of("qwen2")
    expected = definition(model, TOKENS, LENGTHS, MASK)
    model.add_adapter(lora(target_modules=["q_proj"]))
    out = causal_log_probs(model, TOKENS, LENGTHS, MASK).log_probs
    close(out, definition(model, TOKENS, LENGTHS, MASK))
    assert (out - expected).abs().max() > 0.1


def test_a_model_without_adapters_is_refused():
    with pytest.raises(TypeError, match=r"adapted: expected a peft model .* got Qwen2ForCausalLM"):
        WithoutAdapters(model_of("qwen2"))


@pytest.mark.parametrize(
    "config",
    [
        lora(target_modules=["q_proj", "lm_head"]),
        PROMPT,
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
