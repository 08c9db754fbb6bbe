"""Log-probs whose gradients are computed ahead, for the loss that the caller is expected to take.

The backward pass shows what the caller did with the log-probs, because it gets the derivative of
the loss by each of them. If these are the expected ones, up to one factor, the gradients that were
computed ahead are scaled by it. If they differ, the gradients are computed again, so that a wrong
expectation costs time but never gives a wrong gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fusedrl.integrations.trl_log import log_once
from fusedrl.integrations.trl_loss import Plan, PlanMisses, log_not_fused
from fusedrl.ops import _dispatch
from fusedrl.ops._autograd import first_derivative_only
from fusedrl.ops._head import Head
from fusedrl.ops.linear_policy_loss import autograd, two_pass
from fusedrl.ops.linear_policy_loss.autograd import Rows, Task, Terms
from fusedrl.ops.linear_policy_loss.losses import (
    PolicyBatch,
    Sequences,
    TermWeights,
    sequences_of,
)
from fusedrl.ops.linear_policy_loss.reference import policy_slopes
from fusedrl.ops.linear_token_log_probs import linear_token_log_probs

_EPS = torch.finfo(torch.float32).eps


def log_probs_with_gradients(
    plan: Plan, head: Head, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor] | None:
    """Log-probs and entropies ``[N]``, 0 where the plan asks for none.

    ``None`` if the rows are not those of the plan, the loss has no finite gradient, or there is no
    compiled op.
    """
    device = head.hidden.device
    chosen = _dispatch.choose("auto", "linear_policy_loss", device, head.hidden.dtype)
    if chosen == "reference":
        log_not_fused(plan.trainer, f"there is no compiled op for {device.type}")
        return None
    placed = _placed(plan, targets)
    if placed is None:
        log_not_fused(plan.trainer, "the head got other rows than those of the completions")
        return None
    place, offsets = placed
    columns = (None if column is None else place(column.float()) for column in plan.batch)
    weights = (None if weight is None else place(weight.float()) for weight in plan.weights)
    rows = Rows(
        *(targets.to(torch.int64).contiguous(), place(plan.scored), offsets, False),
        _dispatch.temperature_tensor(temperature, device, chosen),
    )
    task = Task(
        *(head, rows, PolicyBatch(*columns), TermWeights(*weights), plan.surrogate),  # pyright: ignore[reportArgumentType]
        entropy=True,
    )
    sequences = sequences_of(targets, place(plan.kept), offsets, shift=False)
    if plan.level == "token":
        terms = autograd.run(task)
    else:
        terms = two_pass.from_sequence_ratios(task, plan.level, sequences)
    expected, tolerance = _expected(task, plan.level, sequences, terms)
    if not expected.isfinite().all():  # a gradient that does not count is still multiplied by 0
        return None
    return _Ahead.apply(
        *(terms.values.sum(), terms.log_probs, terms.entropy, expected, tolerance),
        *(head, rows, plan.record, plan.trainer, head.hidden, head.weight, head.bias),
    )


def _placed(plan: Plan, targets: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor] | None:
    """A function that puts ``[B, K]`` into the order of the head's rows, and the sequence starts.

    TRL's head takes every position that predicts another or, on a GPU, the scored ones.
    """
    count, width = plan.tokens.shape
    if plan.before >= 0 and len(targets) == count * (plan.before + width):
        lengths = torch.full((count,), plan.before + width, device=targets.device)

        def place(column: Tensor) -> Tensor:
            return functional.pad(column, (plan.before, 0)).flatten()

    elif len(targets) == int(plan.scored.sum()):
        lengths = plan.scored.sum(1)

        def place(column: Tensor) -> Tensor:
            return column[plan.scored]

    else:
        return None
    if not torch.equal(place(plan.tokens)[place(plan.scored)], targets[place(plan.scored)]):
        return None
    return place, functional.pad(lengths.cumsum(0), (1, 0))


@torch.no_grad()
def _expected(task: Task, level: str, sequences: Sequences, terms: Terms) -> tuple[Tensor, Tensor]:
    """The derivatives of the loss by log-probs and entropies ``[2, N]``, and their tolerance.

    A ratio is the exponential of a difference of log-probs, or of sums of them, and errs by as much
    as these do. A KL is a difference of terms that are larger than itself.
    """
    log_probs, weights, batch = terms.log_probs, task.weights, task.batch
    slopes = policy_slopes(log_probs, batch, weights, task.surrogate, level, sequences)
    of_entropy = torch.zeros_like(slopes) if weights.entropy is None else weights.entropy
    expected = torch.stack((slopes, of_entropy))
    sizes = log_probs.abs()
    if batch.old_log_probs is not None:
        sizes = sizes + torch.where(sequences.kept, batch.old_log_probs, 0).abs()
    if level == "sequence":
        sizes = sequences.sums(sizes)
    relative = _EPS * (16 + 4 * (sizes.amax() if len(sizes) else 0))
    magnitude = expected.abs()
    if weights.kl is not None and batch.ref_log_probs is not None:
        gap = torch.where(weights.kl != 0, batch.ref_log_probs - log_probs, 0)
        magnitude[0] += weights.kl.abs() * (1 + gap.abs() + gap.clamp(max=10).exp())
    return expected, relative * magnitude


class _Ahead(torch.autograd.Function):
    """Log-probs and entropies; the gradient of the loss if theirs are the expected ones."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        log_probs: Tensor,
        entropy: Tensor,
        expected: Tensor,
        tolerance: Tensor,
        head: Head,
        rows: Rows,
        record: PlanMisses,
        trainer: str,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(expected, tolerance, hidden, weight, bias)
        ctx.head, ctx.rows = head._replace(hidden=None, weight=None, bias=None), rows
        ctx.record, ctx.trainer = record, trainer
        return log_probs.clone(), entropy.clone()

    @staticmethod
    @first_derivative_only(
        "ChunkedLogProbFunction", "leave it out of the names for patch_trl, as TRL's own has one"
    )
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        expected, tolerance, hidden, weight, bias = ctx.saved_tensors
        found = torch.stack([torch.zeros_like(expected[0]) if g is None else g for g in grads])
        factor = _common_factor(found, expected, tolerance)
        nothing = (None,) * 8
        if factor is not None:
            ctx.record.misses = 0
            return factor, *nothing, None, None, None
        if found.isfinite().all():  # after an overflow, nothing says which loss it was
            ctx.record.misses += 1
            log_once(
                f"trl: {ctx.trainer}: the gradient of its loss is not the one of its options, so "
                "that the one made ahead is not used"
            )
        head = ctx.head._replace(hidden=hidden, weight=weight, bias=bias)
        return None, *nothing, *_gradients(head, ctx.rows, found, ctx.needs_input_grad[-3:])


def _common_factor(found: Tensor, expected: Tensor, tolerance: Tensor) -> Tensor | None:
    """The number by which ``expected`` has to be multiplied to give ``found``, or ``None``."""
    exact, wanted = found.double(), expected.double()
    if not exact.any():
        return found.new_zeros(())
    factor = (exact * wanted).sum() / wanted.square().sum()
    if not ((exact - factor * wanted).abs() <= factor.abs() * tolerance).all():
        return None
    # Up to rounding it is 1 if nothing scales the loss, and then the gradients stay as they are.
    return torch.where((factor - 1).abs() < 16 * _EPS, 1, factor).to(found.dtype)


def _gradients(
    head: Head, rows: Rows, upstream: Tensor, wanted: tuple[bool, ...]
) -> list[Tensor | None]:
    """The gradients of hidden states, weight and bias for any upstream gradient ``[2, N]``."""
    with torch.enable_grad():
        leaves = [
            None if x is None else x.detach().requires_grad_(want)
            for x, want in zip(head[:3], wanted, strict=True)
        ]
        hidden, weight, bias = leaves
        assert hidden is not None and weight is not None
        log_probs, entropy = linear_token_log_probs(
            *(hidden, weight, rows.tokens, rows.mask),
            bias=bias,
            softcap=head.softcap or None,
            scale=head.scale,
            temperature=rows.temperature,
            entropy=True,
        )
        differentiated = [x for x in leaves if x is not None and x.requires_grad]
        assert entropy is not None
        outputs = log_probs, entropy
        found = iter(torch.autograd.grad(outputs, differentiated, tuple(upstream)))
    return [next(found) if x is not None and x.requires_grad else None for x in leaves]
