"""What of a loss is computed from hidden states, what as torchrl does it, and what is refused."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils.checkpoint import checkpoint
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import grpo as torchrl_grpo

import fusedrl
from fusedrl.objectives import tokens

from .policies import (
    OUTPUTS,
    Answer,
    actor_of,
    answer_of,
    assert_same,
    batch_of,
    losses_of,
    model_of,
    rows,
    tokenizer,
)

STACK = ("tokens", "stack", False)
PADDED = ("tokens", "padded", True)
RLHF: dict[str, Any] = {"masking_strategy": "rlhf", "kl_to_ref_coeff": 0.1}


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


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (with_objective, "log-probs"),
        (with_aggregation, "log-probs"),
        (with_forward, "terms"),
    ],
)
def test_a_subclass_gets_what_its_methods_differentiate(make, way, ways):
    models = model_of(), model_of(), model_of().double()
    kinds = fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss, torchrl_grpo.GRPOLoss
    losses = [
        make(kind)(actor_of(model, STACK), **RLHF)
        for kind, model in zip(kinds, models, strict=True)
    ]
    assert_same(*(answer_of(loss, batch_of(STACK)) for loss in losses))
    assert ways == [way]


def test_an_objective_of_an_instance(ways):
    losses = losses_of("CISPOLoss", model_of(), STACK, **RLHF)
    for loss in losses:
        loss._compute_policy_objective = lambda lw, advantage: (lw * advantage, lw.mean().detach())
    assert_same(*(answer_of(loss, batch_of(STACK)) for loss in losses))
    assert ways == ["log-probs"]


def with_logits(base):
    class Own(base):
        def _get_cur_log_prob(self, tensordict):
            log_prob, dist, composite = super()._get_cur_log_prob(tensordict)
            return log_prob - 0.1 * dist.logits.square().mean(-1), dist, composite

    return Own


def with_entropy(base):
    class Own(base):
        def _get_entropy(self, dist, adv_shape):
            return dist.probs.square().sum(-1, keepdim=True)

    return Own


def with_log_weight(base):
    class Own(base):
        def _log_weight(self, tensordict, adv_shape):
            log_weight, dist, kl, mask = super()._log_weight(tensordict, adv_shape)
            return log_weight + 0 * dist.logits.sum(-1, keepdim=True), dist, kl, mask

    return Own


@pytest.mark.parametrize("make", [with_logits, with_entropy, with_log_weight])
def test_a_subclass_that_reads_logits_gets_them(make, ways, caplog):
    tokens._logged.clear()
    ours, theirs = (
        make(kind)(actor_of(model_of(), STACK), **RLHF)
        for kind in (fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss)
    )
    for _ in range(2):
        assert_equal(answer_of(ours, batch_of(STACK)), answer_of(theirs, batch_of(STACK)))
    assert ways == ["torchrl", "torchrl"]
    (record,) = [r for r in caplog.records if r.name == "fusedrl" and "of its own" in r.message]
    assert record.levelno == logging.WARNING and record.message.startswith("Own: it has _")


class OwnWrapper(TransformersWrapper):
    pass


def test_an_actor_of_another_class(ways, caplog):
    tokens._logged.clear()
    losses = []
    for kind in (fusedrl.GRPOLoss, torchrl_grpo.GRPOLoss):
        options = {"input_mode": "tokens", "generate": False, "return_log_probs": True}
        actor = OwnWrapper(model_of(), tokenizer=tokenizer(), **options)
        losses.append(kind(actor, **RLHF))
    assert_equal(*(answer_of(loss, batch_of(STACK)) for loss in losses))
    assert ways == ["torchrl"]
    assert "its actor is a OwnWrapper" in caplog.text


def test_an_actor_that_calls_its_model_in_its_own_way(ways, caplog):
    tokens._logged.clear()
    losses = losses_of("GRPOLoss", model_of(), STACK, **RLHF)[:2]
    for loss in losses:
        actor = loss.actor_network
        actor._get_rlhf_dist = type(actor)._get_rlhf_dist.__get__(actor)
    assert_equal(*(answer_of(loss, batch_of(STACK)) for loss in losses))
    assert ways == ["torchrl"] and "in a way of its own" in caplog.text


def test_tokens_that_are_not_those_the_actor_reads(ways, caplog):
    tokens._logged.clear()
    data = batch_of(PADDED)
    data["others"] = (data["tokens", "full"] + 1) % 100
    losses = losses_of("GRPOLoss", model_of(), PADDED, **RLHF)[:2]
    for loss in losses:
        loss.set_keys(action="others")
    assert_equal(*(answer_of(loss, data.copy()) for loss in losses))
    assert ways == ["torchrl"] and "not those that the model reads" in caplog.text


def test_a_batch_in_which_nothing_counts(ways):
    data = batch_of(PADDED)
    data["masks", "all_assistant_mask"] = torch.zeros_like(data["masks", "all_assistant_mask"])
    losses = losses_of("GRPOLoss", model_of(), PADDED, **RLHF)[:2]
    ours, theirs = (answer_of(loss, data.copy()) for loss in losses)
    assert ways == ["torchrl"]
    assert all(torch.equal(ours.grads[name], grad) for name, grad in theirs.grads.items())
    assert ours.outputs["loss_objective"] == 0


def test_a_policy_that_exploded(ways, caplog):
    tokens._logged.clear()
    model = model_of()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = torch.nan
    torch.manual_seed(0)
    losses = losses_of("GRPOLoss", model, STACK, **RLHF)[:2]
    outputs = [loss(batch_of(STACK)) for loss in losses]
    assert ways == ["torchrl"] and "no finite entropy" in caplog.text
    for name in OUTPUTS:
        ours, theirs = (getattr(output, name) for output in outputs)
        assert ours is theirs is None or torch.equal(ours.isnan(), theirs.isnan())


def test_torch_func(ways):
    grads = []
    for loss in losses_of("GRPOLoss", model_of(), STACK, **RLHF)[:2]:
        parameters = TensorDict.from_module(loss)

        def objective(weight, loss=loss, parameters=parameters):
            given = parameters.copy()
            given["actor_network", "model", "lm_head", "weight"] = weight
            with given.to_module(loss):
                return loss(batch_of(STACK)).loss_objective

        grads.append(torch.func.grad(objective)(loss.actor_network.model.lm_head.weight.detach()))
    assert ways == ["torchrl"]
    assert torch.equal(*grads)


def test_parameters_given_to_a_call(ways):
    grads = []
    for loss in losses_of("GRPOLoss", model_of(), STACK, **RLHF):
        parameters = TensorDict.from_module(loss)
        leaf = (0.9 * parameters["actor_network", "model", "lm_head", "weight"]).detach()
        given = parameters.copy()
        given["actor_network", "model", "lm_head", "weight"] = leaf.requires_grad_()
        with given.to_module(loss):
            loss(batch_of(STACK)).loss_objective.backward()
        assert loss.actor_network.model.lm_head.weight.grad is None
        grads.append(leaf.grad)
    assert ways == ["terms"]
    ours, theirs, exact = grads
    allowed = 4 * (theirs - exact).abs().max() + 1e-5 * exact.abs().max()
    assert (ours - exact).abs().max() <= allowed


@pytest.mark.heavy
def test_a_compiled_loss(ways):
    losses = losses_of("GRPOLoss", model_of(), STACK, **RLHF)
    compiled = torch.compile(losses[0], backend="eager")
    data = batch_of(STACK)
    ours, theirs, truth = (answer_of(loss, data) for loss in (compiled, *losses[1:]))
    grads = {name.removeprefix("_orig_mod."): grad for name, grad in ours.grads.items()}
    assert_same(ours._replace(grads=grads), theirs, truth)
    assert ways == ["terms"]


def test_no_second_derivative():
    loss = losses_of("GRPOLoss", model_of(), STACK, **RLHF)[0]
    output = loss(batch_of(STACK))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(output.loss_objective, list(loss.parameters()), create_graph=True)


def test_first_tokens_count_as_those_of_the_longest_sequence_do(ways):
    """Nothing predicts them: torchrl has uniform logits there, or what follows the padding."""
    together, _, _ = losses_of("GRPOLoss", model_of(), STACK, masking_strategy="generic")
    alone, truth = losses_of("GRPOLoss", model_of(), STACK, masking_strategy="generic")[1:]
    together.aggregation = alone.aggregation = truth.aggregation = "none"
    ours = together(batch_of(STACK))
    width = ours.loss_objective.shape[1]
    advantages = batch_of(STACK)["advantage"]
    for i, row in enumerate(rows()):
        data = batch_of(STACK, [row])
        data["advantage"] = advantages[i : i + 1]
        for name in ("loss_objective", "loss_entropy"):
            mine = getattr(ours, name)[i, width - len(row.tokens) :]
            other, exact = (getattr(loss(data.copy()), name)[0] for loss in (alone, truth))
            error = (mine - exact).abs().max()
            assert error <= 4 * (other - exact).abs().max() + 1e-6
            assert mine[0] != 0
    entropy = -ours.loss_entropy.detach()[0, 0].item() / together.entropy_coeff
    assert math.isclose(entropy, math.log(len(tokenizer())), rel_tol=1e-6)


def test_packed_inputs_count_as_padded_ones():
    options = {"kl_to_ref_coeff": 0.1, "masking_strategy": "rlhf"}
    answers = []
    for packed in (True, False):
        actor = actor_of(model_of(), STACK, pad_model_input=not packed)
        answers.append(answer_of(fusedrl.GRPOLoss(actor, **options), batch_of(STACK)))
        assert actor.pad_model_input is not packed and actor.out_keys.count("logits") == 0
    assert_equal(*answers)


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


def test_a_checkpoint_runs_the_loss_twice():
    runs = []
    loss = fusedrl.GRPOLoss(actor_of(model_of(), STACK), **RLHF)

    def segment(factor):
        runs.append(1)
        return factor * loss(batch_of(STACK)).loss_objective

    checkpoint(segment, torch.ones((), requires_grad=True), use_reentrant=False).backward()
    assert len(runs) == 2


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(autocast):
    """No further from float64 than torchrl, whose logits are rounded."""
    model = model_of() if autocast else model_of().bfloat16()
    losses = losses_of("GRPOLoss", model, STACK, **RLHF)
    truth = answer_of(losses.pop(), batch_of(STACK))
    errors = []
    for loss in losses:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = loss(batch_of(STACK))
        (output.loss_objective + output.loss_entropy + output.loss_kl_to_ref).backward()
        errors.append(
            [
                *((getattr(output, name) - truth.outputs[name]).abs() for name in OUTPUTS[:6]),
                *((p.grad - truth.grads[n]).norm() for n, p in loss.named_parameters()),
            ]
        )
        assert loss.actor_network.model.lm_head.weight.grad.dtype == model.dtype
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= 2 * theirs + 0.02


def test_dropout_is_applied():
    model = model_of(attention_dropout=0.5).train()
    loss = fusedrl.GRPOLoss(actor_of(model, STACK), **RLHF)
    once, again = (loss(batch_of(STACK)).loss_objective for _ in range(2))
    assert once != again
