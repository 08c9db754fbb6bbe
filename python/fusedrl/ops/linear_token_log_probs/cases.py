"""Calls of ``linear_token_log_probs`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs

SIZES = ({"classes": 2}, {"classes": 2500})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    others: dict[str, Any] = {"tokens": problem.tokens(), "mask": problem.mask(), "softcap": 5.0}
    options = {"shift": True, "entropy": True}
    name = "mask shift softcap entropy"
    yield Case(linear_token_log_probs, name, problem.head(), others | options)
