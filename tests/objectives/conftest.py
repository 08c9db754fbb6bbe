"""Tiny models, on one thread, and which way a loss went."""

from __future__ import annotations

import pytest
from one_thread import one_thread

from fusedrl.objectives import GRPOLoss
from fusedrl.objectives.fused import CannotFuse

__all__ = ["one_thread"]


@pytest.fixture
def ways(monkeypatch):
    """How each call of a GRPO loss was computed: "ours" or "torchrl"."""
    taken = []

    def from_states(*args):
        try:
            result = original(*args)
        except CannotFuse:
            taken.append("torchrl")
            raise
        taken.append("ours")
        return result

    original = GRPOLoss._from_states
    monkeypatch.setattr(GRPOLoss, "_from_states", from_states)
    return taken
