"""Losses whose gradients need the log-probs of other tokens, or of other ranks, first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.ops import _dispatch
from fusedrl.ops._autograd import first_derivative_only
from fusedrl.ops.importance_weights import importance_weights
from fusedrl.ops.linear_policy_loss import autograd
from fusedrl.ops.linear_policy_loss.autograd import REINFORCE, Task, Terms
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Sequences, TermWeights
from fusedrl.ops.linear_policy_loss.reference import policy_terms
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs, reference
from fusedrl.ops.token_log_probs import TokenLogProbs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def corrected(
    task: Task,
    rollout_log_probs: Tensor,
    importance: Mapping[str, Any],
    offsets: Tensor,
    kept: Tensor,
    vocab_offset: int | None = None,
    group: ProcessGroup | None = None,
) -> Task:
    """The task, its objective weighted by how far the policy is from the one that generated."""
    log_probs = task.batch.old_log_probs
    if log_probs is None:
        with torch.no_grad():
            log_probs, _ = _log_probs(task._replace(entropy=False), vocab_offset, group)
    weights, _ = importance_weights(
        log_probs.flatten(), rollout_log_probs.flatten(), kept, offsets, **importance
    )
    share = task.weights.objective
    objective = torch.where(share != 0, share * weights.to(share).view(share.shape), 0)
    return task._replace(weights=task.weights._replace(objective=objective))


def from_log_probs(
    task: Task,
    level: str,
    sequences: Sequences,
    vocab_offset: int | None = None,
    group: ProcessGroup | None = None,
    main_grad: Tensor | None = None,
) -> Terms:
    """The definition over differentiable log-probs: the reference's, or those of all ranks."""
    if group is None:
        head, rows = task.head, task.rows
        if main_grad is not None:
            head = head._replace(weight=_IntoMainGrad.apply(head.weight, main_grad))
        log_probs, entropy = reference.linear_token_log_probs(
            *(head, rows.tokens, rows.mask, rows.offsets, rows.shift, rows.temperature),
            task.entropy,
        )
    else:
        log_probs, entropy = _log_probs(task, vocab_offset, group)
    values = policy_terms(
        log_probs, entropy, task.batch, task.weights, task.surrogate, level, sequences
    )
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return Terms(values, log_probs.detach(), entropy.detach())


class _IntoMainGrad(torch.autograd.Function):
    """A weight in the dtype of its logits, whose gradient is added to another tensor."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.to(_dispatch.result_dtype(weight), copy=True)

    @staticmethod
    @first_derivative_only("linear_policy_loss", "leave out main_grad, and pass impl='reference'")
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grads[0])
        return None, None


def from_sequence_ratios(
    task: Task, level: str, sequences: Sequences, main_grad: Tensor | None
) -> Terms:
    """A loss with ratios of whole sequences: log-probs are computed first, and then gradients."""
    differentiates = task.needs_grad
    with torch.no_grad():
        log_probs, entropy = _log_probs(task)
    if differentiates:
        values, slopes = slopes_of(task, level, sequences, log_probs, entropy)
        linear = task._replace(
            batch=PolicyBatch(-slopes, None, None),
            weights=TermWeights((slopes != 0).to(slopes.dtype), entropy=task.weights.entropy),
            surrogate=REINFORCE,
        )
        values = _WithGradientsOf.apply(values, autograd.run(linear, main_grad).values)
    else:
        with torch.no_grad():
            values = policy_terms(
                log_probs, entropy, task.batch, task.weights, task.surrogate, level, sequences
            )
    return Terms(values, log_probs, torch.zeros_like(log_probs) if entropy is None else entropy)


class _WithGradientsOf(torch.autograd.Function):
    """Values with the gradients of other ones, which may be infinite."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, others: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def slopes_of(
    task: Task, level: str, sequences: Sequences, log_probs: Tensor, entropy: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The terms of a loss, and the derivative of their sum by each log-prob."""
    with torch.enable_grad():
        leaf = log_probs.detach().requires_grad_()
        values = policy_terms(
            leaf, entropy, task.batch, task.weights, task.surrogate, level, sequences
        )
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), slopes


# A compiled graph has no autograd.grad in it. torch.compiler.disable says the same, and imports the
# compiler.
slopes_of._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]


def _log_probs(
    task: Task, vocab_offset: int | None = None, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None]:
    head, rows = task.head, task.rows
    result = linear_token_log_probs(
        head.hidden,
        head.weight,
        rows.tokens,
        rows.mask,
        bias=head.bias,
        softcap=head.softcap or None,
        scale=head.scale,
        offsets=rows.offsets,
        shift=rows.shift,
        temperature=rows.temperature,
        entropy=task.entropy,
        vocab_offset=vocab_offset,
        group=group,
    )
    if isinstance(result, TokenLogProbs):
        return result.log_probs, result.entropy
    assert isinstance(result, Tensor)
    return result, None
