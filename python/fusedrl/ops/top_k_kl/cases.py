"""Calls of ``top_k_kl`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.exact_kl import DIRECTIONS
from fusedrl.ops.top_k_kl import top_k_kl
from fusedrl.ops.top_k_kl.teachers import TAILS

SIZES = ({"classes": 2}, {"classes": 9001})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    rows = {"logits": problem.logits()}
    others = problem.teacher() | {"mask": problem.mask(), "shift": True, "temperature": 0.7}
    for direction, tail in product(DIRECTIONS, TAILS):
        options = others | {"direction": direction, "tail": tail}
        yield Case(top_k_kl, f"{direction} {tail} mask shift", rows, options)
