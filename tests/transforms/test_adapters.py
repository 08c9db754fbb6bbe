"""``RetrieveKL`` of a LoRA policy: its own base model is the reference."""

from __future__ import annotations

import copy

import pytest
import torch
from torchrl.collectors.llm import LLMCollector

from fusedrl import RetrieveKL

from .dialogs import CHATS, assert_rows_equal, conversations, rows

peft = pytest.importorskip("peft")
REF = ("ref_log_probs", "full")


@pytest.fixture
def lora(policy_model):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(policy_model), config).eval()


def test_the_reference_is_the_policy_without_adapters(wrap, lora, policy_model):
    data = conversations().set("reward", torch.ones(len(CHATS), 1, 1))
    expected = RetrieveKL(wrap(lora, "log_probs"), wrap(policy_model, "ref_log_probs"), coeff=0.1)(
        data.copy()
    )
    transform = RetrieveKL(wrap(lora, "log_probs"), coeff=0.1)
    out = transform(data)
    for key in ("kl_penalty", "reward", REF):
        assert_rows_equal(rows(out, key), rows(expected, key))
    assert all(row.abs().max() > 0.01 for row in rows(out, "kl_penalty"))
    weights = sum(parameter.numel() for parameter in transform.parameters())
    assert weights == sum(parameter.numel() for parameter in lora.parameters())


def test_gradients_reach_the_adapters_alone(wrap, lora):
    transform = RetrieveKL(wrap(lora, "log_probs"), detach=False, add_to_reward=False)
    out = transform(conversations(stacked=True))
    sum(row.sum() for row in rows(out, "kl_penalty")).backward()
    for name, parameter in lora.named_parameters():
        assert (parameter.grad is not None) == ("lora_" in name), name


def test_a_policy_without_adapters_needs_a_reference(policy, chat_env, generating_policy):
    with pytest.raises(ValueError, match="only a policy with peft adapters is its own reference"):
        RetrieveKL(policy())
    env = chat_env(RetrieveKL("from_collector"))
    collector = LLMCollector(
        env=env, policy=generating_policy, dialog_turns_per_batch=2, total_dialog_turns=2
    )
    with pytest.raises(ValueError, match="ref_model: expected a log-prob wrapper"):
        next(iter(collector))
    collector.shutdown()
