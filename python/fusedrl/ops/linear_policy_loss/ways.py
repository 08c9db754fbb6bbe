"""Losses that need log-probs before gradients: of other tokens, or from other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

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
    """The task with its objective weighted by how the policy differs from what generated."""
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
) -> Terms:
    """The definition over log-probs that differentiate: the reference's, or those of all ranks."""
    if group is None:
        rows = task.rows
        log_probs, entropy = reference.linear_token_log_probs(
            *(task.head, rows.tokens, rows.mask, rows.offsets, rows.shift, rows.temperature),
            task.entropy,
        )
    else:
        log_probs, entropy = _log_probs(task, vocab_offset, group)
    values = policy_terms(
        log_probs, entropy, task.batch, task.weights, task.surrogate, level, sequences
    )
    entropy = torch.zeros_like(log_probs) if entropy is None else entropy
    return Terms(values, log_probs.detach(), entropy.detach())


def from_sequence_ratios(
    task: Task, level: str, sequences: Sequences, main_grad: Tensor | None
) -> Terms:
    """A loss whose ratio is that of a sequence: its log-probs come first, then its gradients."""
    differentiates = task.needs_grad
    with torch.no_grad():
        log_probs, entropy = _log_probs(task)
    values, slopes = slopes_of(task, level, sequences, log_probs, entropy)
    if differentiates:
        linear = task._replace(
            batch=PolicyBatch(-slopes, None, None),
            weights=TermWeights((slopes != 0).to(slopes.dtype), entropy=task.weights.entropy),
            surrogate=REINFORCE,
        )
        terms = autograd.run(linear, main_grad).values
        values = values + (terms - terms.detach())
    return Terms(values, log_probs, torch.zeros_like(log_probs) if entropy is None else entropy)


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
