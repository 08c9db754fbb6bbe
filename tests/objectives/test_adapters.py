"""Losses of a LoRA policy whose reference is another adapter of the same model."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import set_list_to_stack

import fusedrl
from fusedrl.models import WithAdapter

from .policies import RLHF, actor_of, batch_of, model_of

peft = pytest.importorskip("peft")
HISTORY = ("history", "stack", False)


def grpo(policy, reference):
    actor = actor_of(policy, HISTORY)
    if not isinstance(reference, WithAdapter):
        reference = actor_of(reference, HISTORY, log_probs_key="ref_log_probs")
    with set_list_to_stack(True):
        data = fusedrl.RetrieveKL(actor, reference, add_to_reward=False)(batch_of(HISTORY))
        output = fusedrl.GRPOLoss(actor, **RLHF)(data)
    assert output.kl_to_ref > 0.01
    return output.loss_objective + output.loss_kl_to_ref


def distillation(policy, reference):
    actor, teacher = (actor_of(model, HISTORY) for model in (policy, reference))
    options = {"loss_function": "exact_kl", "teacher_network": teacher}
    return fusedrl.DistillationLoss(actor, **options)(batch_of(HISTORY)).loss_distill


@pytest.mark.parametrize("loss_of", [grpo, distillation])
def test_the_reference_is_another_adapter(loss_of):
    """As with a reference of its own weights, and a step does not change it."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    policy = peft.get_peft_model(model_of(), config)
    policy.add_adapter("ref", config)
    other = copy.deepcopy(policy)
    other.set_adapter("ref")
    found = []
    for reference in (other.merge_and_unload(), WithAdapter(policy, "ref")):
        loss = loss_of(policy, reference)
        loss.backward()
        found.append([loss, *(p.grad for p in policy.parameters() if p.grad is not None)])
        policy.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    loss_of(policy, reference).backward()
    torch.optim.AdamW(policy.parameters(), lr=0.1).step()
    changed = {name for name, x in policy.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {name for name in before if ".default." in name}
