"""The student's log-probs of ``linear_top_k_kl`` in plain torch."""

from __future__ import annotations

from torch import Tensor

from fusedrl.ops._head import Head, reference_logits
from fusedrl.ops.top_k_kl import reference


def log_probs(
    head: Head,
    ids: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
) -> Tensor:
    """The log-probs of ``top_k_kl``, from the logits of the kept rows; 0 for dropped tokens."""
    kept, rows = reference.kept_rows(ids, mask, offsets, shift)
    hidden = head.hidden.reshape(-1, head.hidden.shape[-1])[rows]
    logits = reference_logits(head._replace(hidden=hidden))
    return reference.scattered(reference.of_rows(logits, ids, kept, temperature), kept, ids)
