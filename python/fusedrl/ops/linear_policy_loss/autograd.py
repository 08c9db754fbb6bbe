"""The compiled op behind ``linear_policy_loss``: gradients are made in the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import graph_is_kept
from fusedrl.ops import _autograd, _dispatch, _rounding, _saved_tensors
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
    support: tuple[Tensor, Tensor] | None = None

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


def run(task: Task, main_grad: Tensor | None = None, separate: bool = False) -> Terms:
    """The terms of a loss whose ratio is that of each token: one product, two more for gradients.

    The head is of a dtype that kernels take. Terms may have upstream gradients of their own only
    where they are ``separate``. The host cannot see whether they do without waiting for a device,
    so there the gradients are made in the backward pass: four products.
    """
    head, rows, batch, weights, surrogate, entropy, _ = task
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
        of_weight = None
        if main_grad is not None:
            of_weight = into_main_grad(call.weight, main_grad)
            call = call._replace(weight=call.weight.detach())
        values, results = _autograd.apply(_Autograd, of_weight, separate, *call)
    else:
        results, *_ = torch.ops.fusedrl.linear_policy_loss(*call, False, False, False, False)
        values = _values(results, call.weights)
    return Terms(values, results[..., LOG_PROB], results[..., ENTROPY])


def _values(results: Tensor, weights: Tensor) -> Tensor:
    terms = torch.cat((results[..., TERMS], results[..., ENTROPY, None]), -1)
    return torch.where(weights == 0, 0, terms * weights).flatten(0, -2).sum(0)


def _with_gradients(
    call: OpArguments, wanted: Sequence[bool], in_float: bool
) -> tuple[Tensor, list[Tensor]]:
    """The op's rows, and the gradients of hidden states, weight and bias that are wanted.

    They are float32, but that of the weight is of its dtype unless it is wanted ``in_float``.
    """
    if call.hidden.dtype != torch.float16:
        results, *grads = torch.ops.fusedrl.linear_policy_loss(
            *call, *wanted, in_float, rounds_grads=_rounding.rounds_grads(call.hidden, call.hidden)
        )
        return results, grads
    # A loss scale comes too late for gradients that are made here: float16 holds those of a token
    # that counts about 1, not those of one among many.
    largest = call.weights.abs().amax() if call.weights.numel() else call.weights.new_ones(())
    gain = torch.exp2(-largest.clamp(min=1e-30).log2().ceil())
    scaled = call._replace(weights=call.weights * gain)
    results, *grads = torch.ops.fusedrl.linear_policy_loss(*scaled, *wanted, True)
    return results, [grad / gain for grad in grads]


def into_main_grad(weight: Tensor, main_grad: Tensor) -> Tensor:
    """Zeros of a weight's shape, in float32 or better; their gradient is added to ``main_grad``.

    They are a node of their own, which autograd runs where the weight's gradient is asked for.
    """
    return _IntoMainGrad.apply(weight, main_grad)  # pyright: ignore[reportReturnType]


class _IntoMainGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.main_grad = main_grad
        return weight.new_zeros((), dtype=_dispatch.result_dtype(weight)).expand(weight.shape)

    @staticmethod
    @_autograd.first_derivative_only(
        "linear_policy_loss", "leave out main_grad, and pass impl='reference'"
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(grads[0])
        return None, None


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, of_weight: Tensor | None, separate: bool, *args: Any
    ) -> tuple[Tensor, Tensor]:
        """``of_weight`` takes the gradient of the weight in float32, in place of the weight."""
        call, in_float = OpArguments(*args), of_weight is not None
        later = separate and not call.hidden.is_cpu
        wanted = (False, False, False) if later else _wanted(ctx)
        results, grads = _with_gradients(call, wanted, in_float)
        # Gradients that are made need no constants. The head is kept to see that nobody changes it.
        kept = len(args) if separate else 3
        tensors = [x if isinstance(x, Tensor) and i < kept else None for i, x in enumerate(args)]
        _saved_tensors.save(ctx, results if separate else None, *grads, *tensors)
        ctx.constants = [None if isinstance(x, Tensor) else x for x in args]
        ctx.options = (in_float, separate)
        ctx.mark_non_differentiable(results)
        return _values(results, call.weights), results

    @staticmethod
    @_autograd.first_derivative_only(
        "linear_policy_loss", "pass impl='reference', which has a second one"
    )
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        results, grad_hidden, grad_weight, grad_bias, *tensors = _saved_tensors.saved(ctx)
        args = (c if t is None else t for t, c in zip(tensors, ctx.constants, strict=True))
        call, (in_float, separate) = OpArguments(*args), ctx.options
        wanted, factors = _wanted(ctx), upstream[0]
        grads, scale = [grad_hidden, grad_weight, grad_bias], factors[0]
        if separate and not call.hidden.is_cpu:
            grads = _of_terms(results, call, factors, wanted, in_float)
            scale = torch.ones_like(scale)
        elif separate:
            counting = factors[(call.weights != 0).flatten(0, -2).any(0)]
            if len(counting) and bool((counting != counting[0]).any()):
                grads = _of_terms(results, call, factors, wanted, in_float)
                counting = torch.ones_like(counting)
            scale = counting[0] if len(counting) else scale
        last_pass = ctx.saved_forms is None and _is_last_pass(scale)
        dtype = call.hidden.dtype
        dtypes = (dtype, torch.float32 if in_float else dtype, dtype)
        of_hidden, of_weight, of_bias = (
            _scaled(grad, scale, dtype, last_pass) if want else None
            for grad, want, dtype in zip(grads, wanted, dtypes, strict=True)
        )
        of_head = (None, of_hidden, None) if in_float else (None, of_hidden, of_weight)
        first = of_weight if in_float else None
        return (first, *of_head, of_bias, *(None,) * (len(call) - 3))


def _wanted(ctx: Any) -> tuple[bool, bool, bool]:
    """Whether hidden states, weight and bias require gradients."""
    into_float, _, hidden, weight, bias, *_ = ctx.needs_input_grad
    return hidden, weight or into_float, bias


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
    rows = max(_PART * len(grad) // max(grad.numel(), 1), 1)
    for part, of_part in zip(grad.split(rows), out.split(rows), strict=True):
        # Torch multiplies halves by a number on the CPU in float32, and by one elsewhere in half.
        torch.mul(part if scale.is_cpu else part.float(), scale, out=of_part)
    return out


def _of_terms(
    results: Tensor, call: OpArguments, factors: Tensor, wanted: Sequence[bool], in_float: bool
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
    return _with_gradients(linear, wanted, in_float)[1]


REINFORCE = Surrogate("reinforce", 0.0, 0.0, 0.0, "k3")


def _fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    *options: Any,
    rounds_grads: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, of_hidden, of_weight, of_bias, in_float = options
    of_weights = torch.float32 if in_float else weight.dtype
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
