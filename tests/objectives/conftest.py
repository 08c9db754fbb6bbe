"""Tiny models, on one thread, and which way a loss went."""

from __future__ import annotations

import pytest
from one_thread import one_thread

from fusedrl.objectives.fused import FusedLoss

__all__ = ["one_thread"]


@pytest.fixture
def ways(monkeypatch):
    """Who computed the log-probs of each loss: "ours" or "torchrl"."""
    taken = []

    def fused(self, ours, theirs, td):
        def noticed(td):
            taken[-1] = "torchrl"
            return theirs(td)

        taken.append("ours")
        return original(self, ours, noticed, td)

    original = FusedLoss._fused
    monkeypatch.setattr(FusedLoss, "_fused", fused)
    return taken
