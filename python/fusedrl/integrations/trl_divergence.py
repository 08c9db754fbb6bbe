"""The divergence of TRL's distillation trainer from two heads, over the fused op."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.kernels import chunked_divergence  # pyright: ignore[reportMissingImports]

from fusedrl.integrations.trl_log import log_once
from fusedrl.ops import _dispatch
from fusedrl.ops.exact_kl import ExactKL, share_of
from fusedrl.ops.linear_exact_kl import linear_exact_kl

_theirs = (chunked_divergence.ChunkedDivergenceFunction,)


class Side(NamedTuple):
    """Hidden states and head of the student or of the teacher, as TRL passes them."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float | None

    def in_dtype(self, dtype: torch.dtype) -> Side:
        """Round to the dtype of the products, then convert to the common dtype of both sides."""
        own = self.product_dtype
        return self._replace(
            hidden=self.hidden.to(own).to(dtype),
            weight=self.weight.to(own).to(dtype),
            bias=None if self.bias is None else self.bias.to(own).to(dtype),
        )

    @property
    def product_dtype(self) -> torch.dtype:
        """The dtype in which TRL multiplies with the head."""
        kind = self.hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        return torch.get_autocast_dtype(kind) if autocast else self.hidden.dtype

    def detached(self) -> Side:
        """The same without the history of gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return self._replace(hidden=self.hidden.detach(), weight=self.weight.detach(), bias=bias)


class ChunkedDivergenceFunction:
    """Takes the place of TRL's autograd function of that name, of which only ``apply`` is used."""

    @staticmethod
    def apply(
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Per-token divergence of student and teacher, and the student's entropy, both ``[N]``.

        Args:
            student_hidden: ``[N, H]``.
            student_weight: ``[V, H]``; of the teacher likewise, with a width of its own.
            student_bias: ``[V]``; of the teacher likewise.
            teacher_hidden: of the same tokens. No gradient reaches the teacher.
            teacher_weight: see ``student_weight``.
            teacher_bias: see ``student_bias``.
            beta: 0 for the forward KL(teacher || student), 1 for the reverse KL, and between them
                the generalised Jensen-Shannon divergence.
            temperature: positive divisor of both logits.
            student_logit_scale: factor of the logits; of the teacher likewise.
            student_final_logit_softcapping: bound of the logits; of the teacher likewise.
            teacher_logit_scale: see ``student_logit_scale``.
            teacher_final_logit_softcapping: see ``student_final_logit_softcapping``.

        Returns:
            Divergence and entropy; the entropy has no gradient. TRL's own function computes what
            this op cannot.
        """
        student = Side(
            *(student_hidden, student_weight, student_bias),
            *(student_logit_scale, student_final_logit_softcapping),
        )
        teacher = Side(
            *(teacher_hidden, teacher_weight, teacher_bias),
            *(teacher_logit_scale, teacher_final_logit_softcapping),
        )
        reason = not_ours(student, teacher, beta, temperature)
        if reason is not None:
            log_once(f"trl: {reason}; using TRL's own ChunkedDivergenceFunction")
            return _theirs[0].apply(
                *student[:3], *teacher[:3], beta, temperature, *student[3:], *teacher[3:]
            )
        return head_divergence(student, teacher, None, beta, temperature)


def head_divergence(
    student: Side, teacher: Side, mask: Tensor | None, beta: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """Divergence and the student's entropy of the tokens that the mask keeps; 0 elsewhere."""
    dtype = torch.promote_types(student.product_dtype, teacher.product_dtype)
    student, teacher = student.in_dtype(dtype), teacher.detached().in_dtype(dtype)
    with torch.autocast(student.hidden.device.type, enabled=False):
        result = linear_exact_kl(
            *(student.hidden, student.weight, teacher.hidden, teacher.weight, mask),
            direction="jensen_shannon",
            beta=beta,
            entropy=True,
            bias=student.bias,
            ref_bias=teacher.bias,
            softcap=student.softcap,
            ref_softcap=teacher.softcap,
            scale=student.scale,
            ref_scale=teacher.scale,
            temperature=temperature,
        )
    assert isinstance(result, ExactKL)
    return result.kl, result.entropy.detach()


def not_ours(student: Side, teacher: Side, beta: float, temperature: float) -> str | None:
    """The reason why TRL's own function has to run, or ``None``."""
    if share_of(beta) is None:
        return f"a beta of {beta}"
    if temperature <= 0:
        return f"a temperature of {temperature}"
    for side in (student, teacher):
        if isinstance(side.weight, DTensor):
            return "the head is a DTensor, and gathered by TRL's function"
        if hasattr(side.weight, "ds_id"):
            return "the head is partitioned by DeepSpeed ZeRO-3, and gathered by TRL's function"
        if side.scale <= 0:
            return f"logits scaled by {side.scale}"
        if side.softcap is not None and side.softcap <= 0:
            return f"a softcap of {side.softcap}"
        if side.hidden.device.type not in _dispatch.LIBRARY:
            return f"no compiled kernel for {side.hidden.device.type}"
        if side.hidden.dtype not in _dispatch.KERNEL_DTYPES:
            return f"no compiled kernel for {side.hidden.dtype}"
    return None
