"""Calls of ``linear_exact_kl`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.linear_exact_kl import linear_exact_kl

SIZES = ({"classes": 2}, {"classes": 2500})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    heads = problem.head() | problem.head("ref_", problem.width + 32)
    others = {"mask": problem.mask(), "softcap": 5.0, "shift": True, "entropy": True}
    for direction in DIRECTIONS:
        options = others | {"direction": direction}
        if direction == "jensen_shannon":
            options["beta"] = 0.2
        yield Case(linear_exact_kl, f"{direction} mask shift softcap entropy", heads, options)
