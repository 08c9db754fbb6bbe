"""Calls of ``token_kl`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.token_kl import ESTIMATORS, token_kl

SIZES = ({"length": 1000},)


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    log_probs = -problem.column().abs()
    # Differences from 1e-5 to 1, where k3 cancels and where it does not.
    size = 10 ** -problem.column().abs().clamp(max=5)
    columns = {"log_probs": log_probs, "ref_log_probs": log_probs + size * problem.column().sign()}
    mask, reward = problem.mask(), problem.column()
    for estimator in ESTIMATORS:
        options = {"estimator": estimator}
        yield Case(token_kl, estimator, columns, options)
        others = options | {"mask": mask, "coeff": torch.tensor(0.1)}
        yield Case(token_kl, f"{estimator} mask reward", columns | {"reward": reward}, others)
