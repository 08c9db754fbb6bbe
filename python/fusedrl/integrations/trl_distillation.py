"""The loss of TRL's distillation trainer, from hidden states, over the fused op."""

from __future__ import annotations

from torch import Tensor
from trl.trainer import distillation_trainer  # pyright: ignore[reportMissingImports]

from fusedrl.compat.trl import DIVERGENCE_LOSS
from fusedrl.integrations.trl_divergence import Side, head_divergence, not_ours
from fusedrl.integrations.trl_log import log_once

_their_loss = getattr(distillation_trainer, DIVERGENCE_LOSS)


def chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Tensor,
    teacher_lm_head_weight: Tensor,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Tensor | int | None = None,
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, sum of entropies and number of tokens; only tokens that count are multiplied.

    Hidden states are ``[B, K, H]``, and the mask ``[B, K]``. The loss is the sum of the divergences
    over ``num_items_in_batch``, or over the tokens that count.
    """
    student = Side(
        *(student_hidden_states, student_lm_head_weight, student_lm_head_bias),
        *(student_logit_scale, student_final_logit_softcapping),
    )
    teacher = Side(
        *(teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias),
        *(teacher_logit_scale, teacher_final_logit_softcapping),
    )
    reason = not_ours(student, teacher, beta, temperature)
    if reason is not None:
        log_once(f"trl: {reason}; using TRL's own loss of the distillation trainer")
        return _their_loss(
            *(student.hidden, teacher.hidden, student.weight, teacher.weight, completion_mask),
            *(beta, num_items_in_batch, student.bias, teacher.bias, student.scale, teacher.scale),
            *(student.softcap, teacher.softcap, temperature),
        )
    mask = completion_mask != 0
    count = mask.sum()
    divergence, entropy = head_divergence(student, teacher, mask, beta, temperature)
    items = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    items = items.to(divergence.device) if isinstance(items, Tensor) else items
    return divergence.sum() / items, entropy.sum(), count
