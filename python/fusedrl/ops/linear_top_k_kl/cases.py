"""Calls of ``linear_top_k_kl`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.linear_top_k_kl import linear_top_k_kl
from fusedrl.ops.top_k_kl.teachers import TAILS

SIZES = ({"classes": 2}, {"classes": 2500})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    rows = problem.head()
    others = problem.teacher() | {"mask": problem.mask(), "shift": True, "softcap": 5.0}
    for direction, tail in product(DIRECTIONS, TAILS):
        options = others | {"direction": direction, "tail": tail}
        yield Case(linear_top_k_kl, f"{direction} {tail} mask shift softcap", rows, options)
