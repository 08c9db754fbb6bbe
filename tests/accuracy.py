"""How large an error may be."""

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


def product_rounding(model: torch.nn.Module) -> float:
    """How far log-probs may lie apart whose matrix products had other numbers of rows, in nats.

    The order in which a BLAS adds up the terms of a sum depends on them, and every addition rounds:
    an epsilon of the largest logit for each term of the sums that a value goes through.
    """
    terms = sum(x.in_features for x in model.modules() if isinstance(x, torch.nn.Linear))
    head = model.lm_head.weight.detach()  # behind a norm, which makes values of size 1
    largest = head.norm(dim=1).max().item() * head.shape[1] ** 0.5
    return terms * torch.finfo(head.dtype).eps * largest
