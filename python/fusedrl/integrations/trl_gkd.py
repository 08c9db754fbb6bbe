"""The loss of TRL's GKD trainer, from the logits of student and teacher, over the fused op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl.experimental.gkd import gkd_trainer  # pyright: ignore[reportMissingImports]

from fusedrl.integrations.trl_log import log_once
from fusedrl.ops import _dispatch
from fusedrl.ops.exact_kl import exact_kl, share_of

_theirs = gkd_trainer.GKDTrainer.generalized_jsd_loss


def _generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Tensor | int | None = None,
) -> Any:
    """The generalised Jensen-Shannon divergence, reduced as TRL's trainer reduces it.

    Args:
        student_logits: ``[B, T, V]``, read with the strides that they have.
        teacher_logits: the same shape.
        labels: ``[B, T]``, -100 where a token does not count; logits there are not read.
        beta: 0 for the forward KL(teacher || student), 1 for the reverse KL.
        temperature: positive divisor of both logits.
        reduction: ``"batchmean"``, ``"sum"`` or ``"mean"`` over tokens and classes. TRL's own
            function computes others, which have one value for each class.
        num_items_in_batch: divides the sum instead.
    """
    reason = _not_ours(student_logits, teacher_logits, labels, beta, temperature, reduction)
    if reason is not None:
        log_once(f"trl: {reason}; using TRL's own loss of GKD")
        return _theirs(
            *(student_logits, teacher_logits, labels, beta, temperature, reduction),
            num_items_in_batch,
        )
    mask = None if labels is None else labels != -100
    divergence = exact_kl(
        *(student_logits, teacher_logits, mask),
        direction="jensen_shannon",
        beta=beta,
        temperature=temperature,
    )
    assert isinstance(divergence, Tensor)
    autocast = torch.is_autocast_enabled(student_logits.device.type)
    total = divergence.sum().to(torch.float32 if autocast else student_logits.dtype)
    if num_items_in_batch is not None:
        items = num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)
    if reduction == "sum":
        return total
    if reduction == "mean":
        tokens = divergence.numel() if mask is None else mask.sum()
        return total / (tokens * student_logits.shape[-1])
    return total / (max(len(divergence), 1) if mask is None else mask.sum().clamp_min(1))


def _not_ours(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None,
    beta: float,
    temperature: float,
    reduction: str,
) -> str | None:
    """The reason why TRL's own function has to run, or ``None``."""
    if reduction not in ("batchmean", "sum", "mean"):
        return f"reduction {reduction!r}, one value a class"
    if share_of(beta) is None:
        return f"a beta of {beta}"
    if temperature <= 0:
        return f"a temperature of {temperature}"
    shapes = {student_logits.shape, teacher_logits.shape}
    if student_logits.dim() not in (2, 3) or len(shapes) > 1:
        return f"logits of shapes {', '.join(str(tuple(x)) for x in shapes)}"
    if labels is not None and labels.shape != student_logits.shape[:-1]:
        return f"labels of shape {tuple(labels.shape)}"
    if student_logits.device.type not in _dispatch.LIBRARY:
        return f"no compiled kernel for {student_logits.device.type}"
    if student_logits.dtype not in _dispatch.KERNEL_DTYPES:
        return f"no compiled kernel for {student_logits.dtype}"
    if teacher_logits.dtype != student_logits.dtype:
        return f"student logits of {student_logits.dtype} and a teacher's of {teacher_logits.dtype}"
    return None


generalized_jsd_loss = staticmethod(_generalized_jsd_loss)
