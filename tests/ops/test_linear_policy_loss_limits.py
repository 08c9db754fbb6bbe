"""linear_policy_loss: ratios and terms that overflow, inference mode, tensors that change later."""

from __future__ import annotations

import pytest
import torch

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
