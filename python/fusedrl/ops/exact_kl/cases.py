"""Calls of ``exact_kl`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.exact_kl import DIRECTIONS, exact_kl

SIZES = ({"classes": 2}, {"classes": 1001})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    rows = {"logits": problem.logits(), "ref_logits": problem.logits()}
    others = {"mask": problem.mask(), "temperature": 0.7, "shift": True, "entropy": True}
    for direction in DIRECTIONS:
        options = others | {"direction": direction}
        yield Case(exact_kl, f"{direction} mask shift entropy", rows, options)
