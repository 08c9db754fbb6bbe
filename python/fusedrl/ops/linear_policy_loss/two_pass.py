"""Losses whose gradients need the log-probs of other tokens, or of other ranks, first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch
from fusedrl.ops.importance_weights import importance_weights
from fusedrl.ops.linear_policy_loss import autograd
from fusedrl.ops.linear_policy_loss.autograd import REINFORCE, Task, Terms
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Sequences, TermWeights
from fusedrl.ops.linear_policy_loss.reference import policy_slopes, policy_terms
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs, reference

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
    flat = log_probs.flatten(), rollout_log_probs.flatten(), kept
    weights, _ = importance_weights(*flat, offsets=offsets, **importance)
    share = task.weights.objective
    objective = torch.where(share != 0, share * weights.to(share).view(share.shape), 0)
    return task._replace(weights=task.weights._replace(objective=objective))


def from_log_probs(
    task: Task,
    level: str,
    sequences: Sequences,
    chosen: str,
    vocab_offset: int | None = None,
    group: ProcessGroup | None = None,
) -> Terms:
    """The definition over log-probs that differentiate: of the ``chosen`` implementation."""
    by_definition = chosen == "reference" and group is None
    if by_definition:
        head, rows = task.head, task.rows
        log_probs, entropy = reference.linear_token_log_probs(
            *(head, rows.tokens, rows.mask, rows.offsets, rows.shift, rows.temperature),
            task.entropy,
        )
    else:
        log_probs, entropy = _log_probs(task, vocab_offset, group)
    values = policy_terms(
        log_probs, entropy, task.batch, task.weights, task.surrogate, level, sequences
    )
    if not by_definition:
        values = _WithGradientsOf.apply(values.detach(), values)
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return Terms(values, log_probs.detach(), entropy.detach())


def from_sequence_ratios(task: Task, level: str, sequences: Sequences) -> Terms:
    """A loss with ratios of whole sequences: log-probs are computed first, and then gradients."""
    with torch.no_grad():
        log_probs, entropy = _log_probs(task)
        columns = task.batch, task.weights, task.surrogate, level, sequences
        values = policy_terms(log_probs, entropy, *columns)
    if task.needs_grad:
        slopes = policy_slopes(log_probs, *columns)
        linear = task._replace(
            batch=PolicyBatch(-slopes, None, None),
            weights=TermWeights((slopes != 0).to(slopes.dtype), entropy=task.weights.entropy),
            surrogate=REINFORCE,
        )
        values = _WithGradientsOf.apply(values, autograd.run(linear).values)
    return Terms(values, log_probs, torch.zeros_like(log_probs) if entropy is None else entropy)


class _WithGradientsOf(torch.autograd.Function):
    """Values with the gradients of other ones, which may be infinite."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, others: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    @_autograd.first_derivative_only("linear_policy_loss")
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, grads[0]


def _log_probs(
    task: Task, vocab_offset: int | None = None, group: ProcessGroup | None = None
) -> tuple[Tensor, Tensor | None]:
    head, rows = task.head, task.rows
    temperature = rows.temperature
    # Made of a number: a capture was refused a tensor of the caller's that is on the CPU.
    if temperature.is_cpu and _dispatch.is_capturing(head.hidden.device):
        temperature = temperature.item()
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
        temperature=temperature,
        entropy=task.entropy,
        vocab_offset=vocab_offset,
        vocab_group=group,
    )
    return result.log_probs, result.entropy
