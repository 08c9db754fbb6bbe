"""Wrap the methods of TRL's trainers that compute log-probs under a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fusedrl.logs import warn_once
from fusedrl.models.shared_rows import sharing_prefixes


def sharing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap such a method so that prefixes shared by rows of its batch are computed once."""
    if theirs.__module__ == __name__:
        return theirs

    def compute_sharing(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _warn_of_truncation(self)
        with ExitStack() as stack:
            # DPO computes the reference's log-probs in its loss.
            for each in {model, getattr(self, "ref_model", None)} - {None}:
                stack.enter_context(sharing_prefixes(each))
            return theirs(self, model, *args, **kwargs)

    compute_sharing.__qualname__ = "compute_sharing"
    return compute_sharing


def _warn_of_truncation(trainer: Any) -> None:
    """Warn once if the sampler truncates the distribution, which TRL's log-probs ignore."""
    changed = getattr(trainer.args, "generation_kwargs", None) or {}
    top_p, top_k, min_p = (
        changed.get(name, getattr(trainer, name, None)) for name in ("top_p", "top_k", "min_p")
    )
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        warn_once(
            f"trl: {type(trainer).__name__}: completions are sampled with top_p={top_p}, "
            f"top_k={top_k} and min_p={min_p}, but TRL computes log-probs over the whole "
            "vocabulary: ratios, KL and gradients are those of another policy; sample with "
            "top_p=1, top_k=0 and min_p=None"
        )
