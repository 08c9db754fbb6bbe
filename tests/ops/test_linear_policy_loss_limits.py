"""linear_policy_loss at its limits, with tensors that change later, and beside Liger."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from fusedrl import linear_policy_loss

from .test_linear_policy_loss import LOSSES, OFFSETS, Problem


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_clipped_ratio_that_overflows_has_no_gradient(ratio, dual_clip, impl):
    """Its exponential is infinite, and what it is multiplied by is 0."""
    problem = Problem()
    problem.advantages = torch.full((9,), -1.0)
    problem.advantages[3:] = 1.0
    if dual_clip is None:
        problem.advantages[:3] = 0.5
    options = {"offsets": OFFSETS, "loss": "rloo", "ratio": ratio, "dual_clip": dual_clip}
    options["old_log_probs"] = torch.where(torch.arange(9) == 1, -300.0, problem.old)
    result, grads = problem.run(impl=impl, **options)
    assert result.ratio.largest.isinf() and result.loss.isfinite()
    kept = torch.arange(9) >= 3 if ratio == "sequence" else torch.arange(9) != 1
    share = {"normalizer": 1.0, "aggregation": "token"}
    clipped, grads = problem.run(impl=impl, **options, **share)
    rest, expected = problem.run(impl=impl, mask=kept, **options, **share)
    lost = (~kept).sum() * (3.0 if dual_clip else -1.2 * 0.5)
    torch.testing.assert_close(clipped.loss, rest.loss + lost)
    for grad, other in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("impl", ["cpu", "reference"])
@pytest.mark.parametrize("loss", ["grpo", "gspo", "rloo"])
def test_one_infinite_term_leaves_the_others_as_they_are(loss, impl):
    problem = Problem()
    ref = problem.ref.clone()
    ref[2] = -torch.inf
    options = {"offsets": OFFSETS, "loss": loss, "impl": impl}
    plain, _ = problem.run(**options)
    result, _ = problem.run(**options, ref_log_probs=ref, kl_coeff=0.1)
    assert result.loss == torch.inf and result.kl == torch.inf
    torch.testing.assert_close(result.objective, plain.objective)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_rollout_of_inference_mode_is_trained_on(loss):
    problem = Problem()
    problem.mask = torch.arange(9) % 4 != 1
    options = {"loss": loss, "offsets": OFFSETS, "kl_coeff": 0.1}
    _, expected = problem.run(mask=problem.mask, **options)
    with torch.inference_mode():
        for name in ("tokens", "old", "ref", "advantages", "mask"):
            setattr(problem, name, getattr(problem, name).clone())
    _, grads = problem.run(mask=problem.mask, **options)
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad, other)


def test_constants_may_be_used_again_before_the_backward_pass():
    """As buffers of a rollout that is written for the next step; the head may not change."""
    problem = Problem()
    _, expected = problem.run()
    leaves = [x.clone().requires_grad_() for x in problem.head]
    hidden, weight, bias = leaves
    args = (problem.tokens, problem.advantages)
    options = {"bias": bias, "old_log_probs": problem.old}
    result = linear_policy_loss(hidden, weight, *args, **options)
    for constant in (problem.tokens, problem.advantages, problem.old, result.log_probs):
        constant.zero_()
    result.loss.backward(retain_graph=True)
    for leaf, other in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, other)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.loss.backward()


@pytest.mark.parametrize(
    ("loss", "theirs"),
    [
        ("grpo", {"loss_type": "grpo"}),
        ("grpo", {"loss_type": "grpo", "delta": 1.5}),
        ("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("dr_grpo", {"loss_type": "dr_grpo", "max_completion_length": 10}),
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        ("cispo", {"loss_type": "cispo", "epsilon_high": 1.3}),
    ],
    ids=str,
)
def test_values_and_gradients_are_ligers(loss, theirs):
    """Liger's formula over log-probs of torch, in float64."""
    ppo = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss")
    problem = Problem(rows=12)
    mask = torch.rand(3, 4) < 0.7
    for name in ("tokens", "old", "ref"):
        setattr(problem, name, getattr(problem, name).view(3, 4))
    problem.head[0] = problem.head[0].view(3, 4, -1)
    problem.advantages = problem.advantages[:3]
    options = {"loss": loss, "kl_coeff": 0.04, "mask": mask, "clip": 0.2}
    if loss == "dapo":
        options["clip"] = (0.2, 0.28)
    if loss == "cispo":
        options["clip"] = (1.0, 0.3)
    if loss == "dr_grpo":
        options["normalizer"] = 30
    if "delta" in theirs:
        options["dual_clip"] = 1.5
    mine, grads = problem.run(**options)
    leaves = [x.double().requires_grad_() for x in problem.head]
    log_softmax = torch.log_softmax(functional.linear(*leaves), -1)
    log_probs = log_softmax.gather(-1, problem.tokens[..., None]).squeeze(-1)
    value, _ = ppo.LigerFusedLinearGRPOFunction.ppo_loss_fn(
        *(log_probs, mask.double(), problem.advantages.double(), mask.double()),
        ref_per_token_logps=problem.ref.double(), old_per_token_logps=problem.old.double(),
        beta=0.04, **theirs,
    )  # fmt: skip
    torch.testing.assert_close(mine.loss.double(), value, rtol=1e-5, atol=1e-6)
    for got, want in zip(grads, torch.autograd.grad(value, leaves), strict=True):
        atol = 1e-5 * want.abs().max().item()
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=atol)
