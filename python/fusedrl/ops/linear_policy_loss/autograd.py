"""The compiled op behind ``linear_policy_loss``: gradients are made in the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import graph_is_kept
from fusedrl.ops import _autograd, _dispatch, _rounding
from fusedrl.ops._head import Head
from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights

# Columns of the op's rows: as PolicyRow in math.h has them.
LOG_PROB, ENTROPY, TERMS, SLOPES = 0, 1, slice(2, 5), slice(5, 8)


class Rows(NamedTuple):
    """Which hidden state predicts which token, as :func:`linear_policy_loss` takes it."""

    tokens: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    shift: bool
    temperature: Tensor


class Terms(NamedTuple):
    """What the loss of a batch is made of.

    Args:
        values: objective, KL to the reference, KL to the old policy and entropy ``[4]``, weighted.
            Where all have the same upstream gradient, the gradients of the forward pass are scaled.
            Separate ones may differ, and are then differentiated once more.
        log_probs: of each token, without gradient; 0 for a dropped one.
        entropy: of each token's distribution; 0 where it was not asked for.
    """

    values: Tensor
    log_probs: Tensor
    entropy: Tensor


class Task(NamedTuple):
    """Everything that a loss depends on; checked, on one device."""

    head: Head
    rows: Rows
    batch: PolicyBatch
    weights: TermWeights
    surrogate: Surrogate
    entropy: bool

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient has to be recorded."""
        hidden, weight, bias, *_ = self.head
        return _autograd.needs_grad(hidden=hidden, weight=weight, bias=bias)


class OpArguments(NamedTuple):
    """The arguments of the compiled op but for which gradients it makes, in its order."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    tokens: Tensor
    mask: Tensor | None
    offsets: Tensor | None
    shift: bool
    temperature: Tensor
    scale: float
    softcap: float
    advantages: Tensor
    old_log_probs: Tensor | None
    ref_log_probs: Tensor | None
    weights: Tensor
    surrogate: int
    low: float
    high: float
    most: float
    estimator: int
    entropy: bool


def run(task: Task, separate: bool = False) -> Terms:
    """The terms of a loss whose ratio is that of each token: one product, two more for gradients.

    The head is of a dtype that kernels take. Terms may have upstream gradients of their own only
    where they are ``separate``. The host cannot see whether they do without waiting for a device,
    so there the gradients are made in the backward pass: four products.
    """
    head, rows, batch, weights, surrogate, entropy = task
    code, low, high, most, estimator = surrogate.codes
    call = OpArguments(
        *head[:3],
        *rows,
        *head[3:],
        *batch,
        weights=weights.stacked(),
        surrogate=code,
        low=low,
        high=high,
        most=most,
        estimator=estimator,
        entropy=entropy,
    )
    if task.needs_grad:
        values, results = _autograd.apply(_Autograd, separate, *call)
    else:
        results, *_ = torch.ops.fusedrl.linear_policy_loss(*call, False, False, False)
        values = _values(results, call.weights)
    return Terms(values, results[..., LOG_PROB], results[..., ENTROPY])


def _values(results: Tensor, weights: Tensor) -> Tensor:
    terms = torch.cat((results[..., TERMS], results[..., ENTROPY, None]), -1)
    return torch.where(weights == 0, 0, terms * weights).flatten(0, -2).sum(0)


def _with_gradients(call: OpArguments, wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor]]:
    """The op's rows, and the gradients of hidden states, weight and bias that are wanted.

    They are float32, but that of a bfloat16 weight, which is rounded.
    """
    if call.hidden.dtype != torch.float16:
        results, *grads = torch.ops.fusedrl.linear_policy_loss(
            *call, *wanted, rounds_grads=_rounding.rounds_grads(call.hidden, call.hidden)
        )
        return results, grads
    # A loss scale comes too late for gradients that are made here: float16 holds those of a token
    # that counts about 1, not those of one among many.
    largest = call.weights.abs().amax() if call.weights.numel() else call.weights.new_ones(())
    gain = torch.exp2(-largest.clamp(min=1e-30).log2().ceil())
    scaled = call._replace(weights=call.weights * gain)
    results, *grads = torch.ops.fusedrl.linear_policy_loss(*scaled, *wanted)
    return results, [grad / gain for grad in grads]


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, separate: bool, *args: Any) -> tuple[Tensor, Tensor]:
        call = OpArguments(*args)
        later = separate and not call.hidden.is_cpu
        wanted = (False, False, False) if later else _wanted(ctx)
        results, grads = _with_gradients(call, wanted)
        # Gradients that are made need no constants. The head is kept to see that nobody changes it.
        kept = len(args) if separate else 3
        tensors = [x if isinstance(x, Tensor) and i < kept else None for i, x in enumerate(args)]
        ctx.save_for_backward(results if separate else None, *grads, *tensors)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in args]
        ctx.separate = separate
        ctx.mark_non_differentiable(results)
        return _values(results, call.weights), results

    @staticmethod
    @_autograd.first_derivative_only(
        "linear_policy_loss", "pass impl='reference', which has a second one"
    )
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        results, grad_hidden, grad_weight, grad_bias, *tensors = ctx.saved_tensors
        args = (c if t is None else t for t, c in zip(tensors, ctx.constants, strict=True))
        call, separate = OpArguments(*args), ctx.separate
        wanted, factors = _wanted(ctx), upstream[0]
        grads, scale = [grad_hidden, grad_weight, grad_bias], factors[0]
        if separate and not call.hidden.is_cpu:
            grads = _of_terms(results, call, factors, wanted)
            scale = torch.ones_like(scale)
        elif separate:
            counting = factors[(call.weights != 0).flatten(0, -2).any(0)]
            if len(counting) and bool((counting != counting[0]).any()):
                grads = _of_terms(results, call, factors, wanted)
                counting = torch.ones_like(counting)
            scale = counting[0] if len(counting) else scale
        last_pass = _is_last_pass(scale)
        scaled = (
            _scaled(grad, scale, call.hidden.dtype, last_pass) if want else None
            for grad, want in zip(grads, wanted, strict=True)
        )
        return (None, *scaled, *(None,) * (len(call) - 3))


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether hidden states, weight and bias require gradients."""
    _, hidden, weight, bias, *_ = ctx.needs_input_grad
    return hidden, weight, bias


def _is_last_pass(scale: Tensor) -> bool:
    """Whether nobody reads what was saved after this backward pass."""
    return _dispatch.has_values(scale) and not graph_is_kept()


_PART = 1 << 22  # elements, so that what is computed in float32 takes little memory


def _scaled(grad: Tensor, scale: Tensor, dtype: torch.dtype, last_pass: bool) -> Tensor:
    """A gradient that was saved times ``scale``, in float32 and rounded once to ``dtype``.

    It is in memory of its own, but where this is the ``last_pass`` in that of ``grad``.
    """
    if not _dispatch.has_values(scale):
        return (grad.float() * scale).to(dtype)
    in_place = last_pass and grad.dtype == dtype
    if in_place and scale.is_cpu and scale == 1:
        return grad
    out = grad if in_place else torch.empty_like(grad, dtype=dtype)
    if not scale.is_cpu:  # one kernel; a factor without dimensions would be rounded to a half
        return torch.mul(grad, scale.reshape(1), out=out)
    rows = max(_PART * len(grad) // max(grad.numel(), 1), 1)
    for part, of_part in zip(grad.split(rows), out.split(rows), strict=True):
        torch.mul(part, scale, out=of_part)  # in float32, of halves too
    return out


def _of_terms(
    results: Tensor, call: OpArguments, factors: Tensor, wanted: Sequence[bool]
) -> list[Tensor]:
    """Gradients where each term has an upstream gradient of its own: every token's is known."""
    weights = call.weights * factors
    slopes = torch.where(weights[..., :3] == 0, 0, results[..., SLOPES] * weights[..., :3]).sum(-1)
    of_terms = TermWeights((slopes != 0).to(slopes.dtype), entropy=weights[..., 3])
    surrogate, low, high, most, estimator = REINFORCE.codes
    linear = call._replace(
        advantages=-slopes,
        old_log_probs=None,
        ref_log_probs=None,
        weights=of_terms.stacked(),
        surrogate=surrogate,
        low=low,
        high=high,
        most=most,
        estimator=estimator,
    )
    return _with_gradients(linear, wanted)[1]


REINFORCE = Surrogate("reinforce", 0.0, 0.0, 0.0, "k3")


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *options: Any,
    rounds_grads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, of_hidden, of_weight, of_bias = options
    of_weights = torch.bfloat16 if weight.dtype == torch.bfloat16 else torch.float32
    grad_hidden, grad_weight, grad_bias = (
        hidden.new_empty((0,)) if x is None or not want else x.new_empty(x.shape, dtype=dtype)
        for x, want, dtype in (
            (hidden, of_hidden, torch.float32),
            (weight, of_weight, of_weights),
            (bias, of_bias, torch.float32),
        )
    )
    rows = hidden.new_empty((*tokens.shape, 8), dtype=_dispatch.result_dtype(hidden))
    return rows, grad_hidden, grad_weight, grad_bias


_dispatch.register_fakes({"linear_policy_loss": _fake})
