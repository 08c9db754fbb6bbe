"""linear_policy_loss beside Liger's losses."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from .test_linear_policy_loss import Problem


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
