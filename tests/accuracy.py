"""The error rule of the op tests."""

from __future__ import annotations

import torch


def no_worse(ours: torch.Tensor, theirs: torch.Tensor, truth: torch.Tensor, tol: float) -> None:
    """Our error against the float64 truth is at most torch's error in the same dtype, plus tol."""
    assert ours.shape == truth.shape
    assert torch.equal(ours.isnan(), truth.isnan())
    assert torch.equal(ours.isinf(), truth.isinf())
    finite = truth.isfinite()
    assert torch.equal(ours[truth.isinf()].sign(), truth[truth.isinf()].sign().to(ours.dtype))
    if finite.any():
        error = (ours[finite].double() - truth[finite]).abs().max().item()
        allowed = (theirs[finite].double() - truth[finite]).abs().nan_to_num(0).max().item()
        assert error <= allowed + tol, f"ours {error:.3g}, torch {allowed:.3g}"
