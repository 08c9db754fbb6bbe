"""Calls of ``token_log_probs`` on small inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fusedrl.ops.cases import Case, Problem
from fusedrl.ops.token_log_probs import token_log_probs

SIZES = ({"classes": 2}, {"classes": 1001}, {"classes": 32768})


def cases(problem: Problem) -> Iterator[Case]:
    """The calls."""
    tokens, mask = problem.tokens(), problem.mask()
    rows = {"logits": problem.logits(4)}
    options = {"shift": True, "entropy": True}
    packed = {"tokens": tokens.flatten(), "mask": mask.flatten(), "offsets": problem.offsets()}
    one_by_one = {"logits": rows["logits"].flatten(0, 1)}
    yield Case(token_log_probs, "plain", rows, {"tokens": tokens})
    others = {"tokens": tokens, "mask": mask, "temperature": torch.tensor(0.7)}
    yield Case(token_log_probs, "mask shift entropy", rows, others | options)
    yield Case(token_log_probs, "packed mask shift entropy", one_by_one, packed | options)
