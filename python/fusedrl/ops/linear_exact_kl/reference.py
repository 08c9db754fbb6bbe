"""Reference implementation of ``linear_exact_kl`` in plain torch, to test kernels against."""

from __future__ import annotations

from torch import Tensor

from fusedrl.ops._head import Head, reference_logits
from fusedrl.ops.exact_kl import reference
from fusedrl.ops.token_log_probs.reference import rows_of_tokens


def linear_exact_kl(
    head: Head,
    ref_head: Head,
    mask: Tensor | None,
    offsets: Tensor | None,
    shift: bool,
    temperature: Tensor,
    beta: float,
    entropies: bool,
) -> tuple[Tensor, Tensor | None]:
    """``exact_kl`` of the logits of the kept rows; 0 for other tokens."""
    shape = head.hidden.shape[:-1]
    rows, keep = rows_of_tokens(head.hidden[..., 0], offsets, shift)
    if mask is not None:
        keep = keep & mask.flatten()
    kept = keep.nonzero().squeeze(-1)
    logits, ref_logits = (
        reference_logits(
            side._replace(hidden=side.hidden.reshape(-1, side.hidden.shape[-1])[rows[kept]])
        )
        for side in (head, ref_head)
    )
    kl, of_both = reference.exact_kl(
        logits, ref_logits, None, None, False, temperature, beta, entropies
    )

    def of_tokens(values: Tensor) -> Tensor:
        zeros = values.new_zeros((shape.numel(), *values.shape[1:]))
        return zeros.index_put((kept,), values).view(*shape, *values.shape[1:])

    return of_tokens(kl), None if of_both is None else of_tokens(of_both)
