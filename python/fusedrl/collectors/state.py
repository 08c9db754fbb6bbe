"""A collector's state: loaded as a whole, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fusedrl.compat.torch import map_leaves
from fusedrl.weights.worker_end import POLICY_STATE


def copied(state: Any) -> Any:
    """A state with tensors of its own, in host memory."""
    return map_leaves(
        lambda x: x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x, state
    )


def load_or_undo(collector: Any, state: Mapping[str, Any], **kwargs: Any) -> None:
    """Call ``collector.load_state_dict``; where that raises, the collector is as it was."""
    before = copied(collector.state_dict())
    if POLICY_STATE not in state:  # weights of a channel, which stay as they are
        before.pop(POLICY_STATE, None)
    try:
        collector.load_state_dict(state, **kwargs)
    except BaseException:
        collector.load_state_dict(before, strict=False)
        raise
