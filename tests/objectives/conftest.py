"""Tiny models, on one thread, and which way a loss went."""

from __future__ import annotations

import pytest
from one_thread import one_thread

from fusedrl.objectives import grpo

__all__ = ["one_thread"]


@pytest.fixture
def ways(monkeypatch):
    """How each call of a loss of ours was computed: "terms", "log-probs" or "torchrl"."""
    taken = []

    def scores_of(*args):
        scores = original(*args)
        if scores is None:
            taken.append("torchrl")
        else:
            taken.append("log-probs" if scores.terms is None else "terms")
        return scores

    original = grpo.scores_of
    monkeypatch.setattr(grpo, "scores_of", scores_of)
    return taken
