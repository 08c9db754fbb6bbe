"""Calls of ``importance_weights`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.importance_weights import LEVELS, importance_weights

SIZES = ({"length": 1000},)


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    rollout = -problem.column().abs().flatten()
    columns = {
        "log_probs": rollout + 0.05 * problem.column().flatten(),
        "rollout_log_probs": rollout,
    }
    others = {
        "mask": problem.mask().flatten(),
        "offsets": problem.offsets(),
        "low": 0.9,
        "high": 1.1,
    }
    for level in LEVELS:
        name = f"{level} mask packed"
        yield Case(importance_weights, name, columns, others | {"level": level}, _weights)
    padded = {name: column.view(problem.shape) for name, column in columns.items()}
    bounds = {"low": torch.tensor(0.9), "high": torch.tensor(1.1)}
    yield Case(importance_weights, "padded", padded, bounds, _weights)
    yield Case(_of_lists, "a list", padded, {"level": "sequence"}, _weights)


def _of_lists(log_probs: Tensor, rollout_log_probs: Tensor, **options: Any) -> Any:
    weights, mismatch = importance_weights(list(log_probs), list(rollout_log_probs), **options)
    return torch.stack(weights), mismatch


def _weights(result: Any) -> list[Tensor]:
    """The weights, and what does not jump where a ratio is rounded across a bound."""
    weights, mismatch = result
    return [weights, mismatch.k1, mismatch.k3, mismatch.ess]
