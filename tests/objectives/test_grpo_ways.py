"""What of a loss is computed from hidden states, what as torchrl does it, and what is refused."""

from __future__ import annotations

import logging

import pytest
import torch
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import grpo as torchrl_grpo

import fusedrl

from .policies import (
    OUTPUTS,
    PADDED,
    RLHF,
    STACK,
    Answer,
    actor_of,
    answer_of,
    assert_same,
    batch_of,
    losses_of,
    model_of,
)


def assert_equal(ours: Answer, theirs: Answer) -> None:
    for mine, other in ((ours.outputs, theirs.outputs), (ours.grads, theirs.grads)):
        assert mine.keys() == other.keys()
        assert all(torch.equal(mine[name], other[name]) for name in mine)


def with_objective(base):
    class Own(base):
        def _compute_policy_objective(self, log_weight, advantage):
            return advantage * log_weight.exp().square(), log_weight.detach().mean()

    return Own


def with_aggregation(base):
    class Own(base):
        def _aggregate_loss_value(self, value, mask, tensordict=None):
            return torch.where(mask[..., None], value, 0).square().sum() / 100

    return Own


def with_forward(base):
    class Own(base):
        def forward(self, tensordict):
            output = super().forward(tensordict)
            output.loss_objective = 2 * output.loss_objective
            return output

    return Own


@pytest.mark.parametrize("make", [with_objective, with_aggregation, with_forward])
def test_a_subclass_gets_what_its_methods_differentiate(make, ways):
    models = model_of(), model_of(), model_of().double()
    kinds = fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss, torchrl_grpo.GRPOLoss
    losses = [
        make(kind)(actor_of(model, STACK), **RLHF)
        for kind, model in zip(kinds, models, strict=True)
    ]
    assert_same(*(answer_of(loss, batch_of(STACK)) for loss in losses))
    assert ways == ["ours"]


def with_logits(base):
    class Own(base):
        def _get_cur_log_prob(self, tensordict):
            log_prob, dist, composite = super()._get_cur_log_prob(tensordict)
            return log_prob - 0.1 * dist.logits.square().mean(-1), dist, composite

    return Own


def test_a_subclass_that_reads_logits_gets_them(ways, caplog):
    ours, theirs = (
        with_logits(kind)(actor_of(model_of(), STACK), **RLHF)
        for kind in (fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss)
    )
    for _ in range(2):
        assert_equal(answer_of(ours, batch_of(STACK)), answer_of(theirs, batch_of(STACK)))
    assert ways == ["torchrl", "torchrl"]
    (record,) = [r for r in caplog.records if r.name == "fusedrl" and "it overrides" in r.message]
    assert record.levelno == logging.WARNING and record.message.startswith("Own: it overrides _")


class OwnWrapper(TransformersWrapper):
    pass


def own_class(loss):
    loss.actor_network.__class__ = OwnWrapper


def own_call(loss):
    actor = loss.actor_network
    actor._get_rlhf_dist = type(actor)._get_rlhf_dist.__get__(actor)


def other_tokens(loss):
    loss.set_keys(action="others")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (own_class, "its actor is a OwnWrapper"),
        (own_call, "does not use its model attribute"),
        (other_tokens, "not those that the model reads"),
    ],
)
def test_what_cannot_be_computed_from_hidden_states(change, why, ways, caplog):
    data = batch_of(PADDED)
    data["others"] = (data["tokens", "full"] + 1) % 100
    losses = losses_of("GRPOLoss", model_of(), PADDED, **RLHF)[:2]
    for loss in losses:
        change(loss)
    assert_equal(*(answer_of(loss, data.copy()) for loss in losses))
    assert ways == ["torchrl"] and why in caplog.text


def test_a_batch_in_which_nothing_counts(ways):
    data = batch_of(PADDED)
    data["masks", "all_assistant_mask"] = torch.zeros_like(data["masks", "all_assistant_mask"])
    losses = losses_of("GRPOLoss", model_of(), PADDED, **RLHF)[:2]
    ours, theirs = (answer_of(loss, data.copy()) for loss in losses)
    assert ways == ["ours"]
    assert all(torch.equal(ours.grads[name], grad) for name, grad in theirs.grads.items())
    assert ours.outputs["loss_objective"] == 0


def test_a_policy_that_exploded(ways):
    """The answer is torchrl's, but for entropies, which torchrl then draws."""
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = torch.nan
    losses = losses_of("GRPOLoss", model, STACK, **RLHF)[:2]
    outputs = [loss(batch_of(STACK)) for loss in losses]
    assert ways == ["ours"]
    for name in set(OUTPUTS) - {"entropy", "loss_entropy"}:
        ours, theirs = (getattr(output, name) for output in outputs)
        assert ours is theirs is None or torch.equal(ours.isnan(), theirs.isnan())
    assert outputs[0].entropy.isnan() and outputs[0].loss_entropy.isnan()


def test_no_second_derivative():
    loss = losses_of("GRPOLoss", model_of(), STACK, **RLHF)[0]
    output = loss(batch_of(STACK))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.loss_objective, list(loss.parameters()), create_graph=True)


@pytest.mark.parametrize("limit", [1, 40, 10000])
def test_tokens_per_forward(limit):
    losses = losses_of("GRPOLoss", model_of(), STACK, **RLHF)
    losses[0].max_tokens_per_forward = limit
    assert_same(*(answer_of(loss, batch_of(STACK)) for loss in losses))


def test_float64():
    ours, theirs, _ = losses_of("GRPOLoss", model_of().double(), STACK, **RLHF)
    mine, other = answer_of(ours, batch_of(STACK)), answer_of(theirs, batch_of(STACK))
    for name, grad in other.grads.items():
        # Its norms compute in float32, on rows that lie elsewhere.
        assert (mine.grads[name] - grad).abs().max() <= 1e-6 * grad.abs().max()


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(autocast):
    """No further from float64 than torchrl, whose logits are rounded."""
    model = model_of() if autocast else model_of().bfloat16()
    losses = losses_of("GRPOLoss", model, STACK, **RLHF)
    truth = answer_of(losses.pop(), batch_of(STACK))
    errors = []
    for loss in losses:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            answer = answer_of(loss, batch_of(STACK))
        assert answer.grads["actor_network.model.lm_head.weight"].dtype == model.dtype
        of_outputs = [(answer.outputs[n] - truth.outputs[n]).abs() for n in OUTPUTS[:6]]
        errors.append(of_outputs + [(answer.grads[n] - truth.grads[n]).norm() for n in truth.grads])
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs + 0.02
