"""Calls of ``linear_policy_loss`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.linear_policy_loss import PolicyLoss, linear_policy_loss
from fusedrl.ops.linear_policy_loss.losses import RECIPES
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs

SIZES = ({"classes": 2}, {"classes": 2500})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    head, tokens = problem.head(), problem.tokens()
    options = {"shift": True, "kl_coeff": 0.1, "entropy_coeff": 0.1, "normalizer": 27.0}
    log_probs = linear_token_log_probs(
        *(head["hidden"], head["weight"], tokens),
        bias=head["bias"],
        shift=True,
        impl="reference",
    ).log_probs
    # Near those of the policy, so that some ratios are clipped and others are not.
    old_log_probs = log_probs + 0.3 * problem.column()
    columns = {
        "tokens": tokens,
        "mask": problem.mask(),
        "advantages": problem.column(),
        "old_log_probs": old_log_probs,
        "ref_log_probs": old_log_probs + problem.column(),
    }
    for loss in RECIPES:
        others = columns | options | {"loss": loss}
        yield Case(linear_policy_loss, f"{loss} mask shift", head, others, _loss)


def _loss(result: PolicyLoss) -> list[Tensor]:
    """What differentiates."""
    return [result.loss]
