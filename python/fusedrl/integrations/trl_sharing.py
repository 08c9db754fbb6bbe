"""Let trainers of TRL compute what rows of a batch begin with once, such as a group's prompt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from fusedrl.models.shared_rows import sharing_prefixes


def sharing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method of a trainer that computes log-probs under its first argument, a model."""

    def compute_sharing(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            # DPO computes the reference's log-probs together with its loss.
            for each in {model, getattr(self, "ref_model", None)} - {None}:
                stack.enter_context(sharing_prefixes(each))
            return theirs(self, model, *args, **kwargs)

    compute_sharing.__qualname__ = "compute_sharing"
    return compute_sharing
