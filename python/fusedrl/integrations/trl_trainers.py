"""What stands around the methods by which trainers of TRL get log-probs under a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fusedrl.logs import warn_once
from fusedrl.models.shared_rows import sharing_prefixes


def sharing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap such a method: what rows of its batch begin with alike is computed once."""
    if theirs.__module__ == __name__:
        return theirs

    def compute_sharing(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        _warn_of_truncation(self)
        with ExitStack() as stack:
            # DPO computes the reference's log-probs together with its loss.
            for each in {model, getattr(self, "ref_model", None)} - {None}:
                stack.enter_context(sharing_prefixes(each))
            return theirs(self, model, *args, **kwargs)

    compute_sharing.__qualname__ = "compute_sharing"
    return compute_sharing


def _warn_of_truncation(trainer: Any) -> None:
    """Warn, once, of a sampler that leaves out classes which TRL's log-probs count."""
    changed = getattr(trainer.args, "generation_kwargs", None) or {}
    top_p, top_k, min_p = (
        changed.get(name, getattr(trainer, name, None)) for name in ("top_p", "top_k", "min_p")
    )
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        warn_once(
            f"trl: {type(trainer).__name__}: completions are sampled with top_p={top_p}, "
            f"top_k={top_k} and min_p={min_p}, but TRL's log-probs are over all classes: ratios, "
            "KL and gradients are those of another policy; sample with top_p=1, top_k=0 and "
            "min_p=None"
        )
