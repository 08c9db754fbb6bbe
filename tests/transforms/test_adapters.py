"""``RetrieveKL`` of a LoRA policy: its own base, or another adapter on it, is the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrl.collectors.llm import LLMCollector

from fusedrl import RetrieveKL, RetrieveLogProb
from fusedrl.models import WithAdapter

from .dialogs import CHATS, assert_rows_equal, conversations, rows

peft = pytest.importorskip("peft")
REF = ("ref_log_probs", "full")


@pytest.fixture
def lora(policy_model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(copy.deepcopy(policy_model), config)
    policy.add_adapter("ref", config)
    return policy.eval()


def reference_of(lora, policy_model, adapter):
    """What to give ``RetrieveKL``, and the same model with weights of its own."""
    if adapter is None:
        return None, policy_model
    other = copy.deepcopy(lora)
    other.set_adapter(adapter)
    return WithAdapter(lora, adapter), other.merge_and_unload()


@pytest.mark.parametrize("adapter", [None, "ref"])
def test_the_reference_shares_the_weights_of_the_policy(wrap, lora, policy_model, adapter):
    data = conversations().set("reward", torch.ones(len(CHATS), 1, 1))
    given, model = reference_of(lora, policy_model, adapter)
    expected = RetrieveKL(wrap(lora, "log_probs"), wrap(model, "ref_log_probs"), coeff=0.1)(
        data.copy()
    )
    transform = RetrieveKL(wrap(lora, "log_probs"), given, coeff=0.1)
    out = transform(data.copy())
    for key in ("kl_penalty", "reward", REF):
        assert_rows_equal(rows(out, key), rows(expected, key))
    assert all(row.abs().max() > 0.01 for row in rows(out, "kl_penalty"))
    weights = sum(parameter.numel() for parameter in transform.parameters())
    assert weights == sum(parameter.numel() for parameter in lora.parameters())
    if given is not None:
        scored = RetrieveLogProb(wrap(given, "ref_log_probs"))(data)
        assert_rows_equal(rows(scored, REF), rows(expected, REF))


@pytest.mark.parametrize("adapter", [None, "ref"])
def test_the_policy_of_a_collector(wrap, lora, policy_model, chat_env, adapter):
    given, model = reference_of(lora, policy_model, adapter)
    policy = wrap(lora, generate=True, generate_kwargs={"max_new_tokens": 6})
    env = chat_env(RetrieveKL("from_collector", given))
    collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
    (batch,) = collector
    collector.shutdown()
    turns = batch.reshape(-1)
    scored = RetrieveLogProb(wrap(model, "ref_log_probs"))(turns.select("history"))
    assert_rows_equal(rows(turns["next"], REF), rows(scored, REF))
    assert lora.active_adapters == ["default"]


def test_gradients_reach_the_adapters_alone(wrap, lora):
    transform = RetrieveKL(wrap(lora, "log_probs"), detach=False, add_to_reward=False)
    out = transform(conversations(stacked=True))
    sum(row.sum() for row in rows(out, "kl_penalty")).backward()
    for name, parameter in lora.named_parameters():
        trained = "lora_" in name and ".default." in name
        assert (parameter.grad is not None) == trained, name


def test_a_policy_without_adapters_needs_a_reference(policy, chat_env, generating_policy):
    with pytest.raises(ValueError, match="only a policy with peft adapters has a default"):
        RetrieveKL(policy())
    env = chat_env(RetrieveKL("from_collector"))
    collector = LLMCollector(
        env=env, policy=generating_policy, dialog_turns_per_batch=2, total_dialog_turns=2
    )
    with pytest.raises(ValueError, match="ref_model: expected a log-prob wrapper"):
        next(iter(collector))
    collector.shutdown()
