"""``token_kl`` of columns of one shape: the op, its one call on the CPU, and its gradient."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedrl import native
from fusedrl.compat.torch import in_dispatch_mode, in_forward_mode, in_trace_of_jit, transform_level
from fusedrl.ops import _autograd, _dispatch

_EXCHANGE = "__dlpack_c_exchange_api__"  # torch's C functions of DLPack

Results = tuple[Tensor, Tensor | None]


def in_one_call(
    log_probs: Tensor,
    ref_log_probs: Any,
    mask: Any,
    offsets: Any,
    reward: Any,
    coeff: float | Tensor,
    estimator: int,
    missing: bool,
) -> Results | None:
    """The KL and, with ``reward``, the penalised reward, of columns on the CPU where they lie.

    The checks of the public function and torch's dispatcher would take longer than thousands of
    tokens. ``None`` for what does not fit, differs in dtype, is not contiguous, is of a subclass or
    inside a transform or a mode: the public function then says or does what is right.
    """
    if torch.compiler.is_compiling() or not _has_memory():
        return None
    kernels = _kernels()
    if kernels is None:
        return None
    weight = _dispatch.scalar_on_host("coeff", coeff)
    found = kernels.forward(
        log_probs, ref_log_probs, mask, offsets, reward, weight, estimator, missing
    )
    if found is None or not torch.is_grad_enabled():
        return found
    of_reward = reward is not None and reward.requires_grad
    if not (log_probs.requires_grad or ref_log_probs.requires_grad or of_reward):
        return found
    return _record(log_probs, ref_log_probs, mask, reward, weight, estimator, missing, (found,))


def samples_in_one_call(
    log_probs: Any, ref_log_probs: Any, reward: Any, coeff: float | Tensor, missing: bool
) -> tuple[Tensor, Tensor | None, list[int]] | None:
    """The same of samples ``[T]`` with rewards ``[T, 1]``, packed, with k1, and their lengths.

    Packing them first would take fresh memory for every column. ``None`` as above, and where a
    gradient is recorded.
    """
    if not log_probs or type(log_probs[0]) is not Tensor or not log_probs[0].is_cpu:
        return None
    if torch.compiler.is_compiling() or not _has_memory() or (kernels := _kernels()) is None:
        return None
    weight = _dispatch.scalar_on_host("coeff", coeff)
    lists = list(log_probs), list(ref_log_probs), None if reward is None else list(reward)
    return kernels.forward_samples(*lists, weight, 0, missing, torch.is_grad_enabled())


def by_op(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    reward: Tensor | None,
    coeff: Tensor,
    estimator: int,
    missing: bool,
) -> Results:
    """The same by torch's dispatcher, for contiguous columns that have been checked."""
    args = log_probs, ref_log_probs, mask, reward, coeff, estimator, missing
    if _autograd.needs_grad(
        log_probs=log_probs, ref_log_probs=ref_log_probs, reward=reward, coeff=coeff
    ):
        kl, penalised = _autograd.apply(_Autograd, *args, None)
    else:
        kl, penalised = torch.ops.fusedrl.token_kl.default(*args)
    return kl, None if reward is None else penalised


class _Autograd(torch.autograd.Function):
    """Results that :func:`in_one_call` has found, or those of the op, and their gradient."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Results:
        *columns, coeff, ctx.estimator, ctx.missing, known = args
        log_probs, ref_log_probs, mask, reward = columns
        kl, penalised = known[0] if known else torch.ops.fusedrl.token_kl.default(*args[:-1])
        ctx.set_materialize_grads(False)
        ctx.weight = None if isinstance(coeff, Tensor) else coeff
        coeff = coeff if ctx.weight is None else None
        ctx.save_for_backward(log_probs, ref_log_probs, mask, coeff)
        constant = [] if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else [kl]
        constant += [penalised] if reward is None and penalised is not None else []
        ctx.mark_non_differentiable(*constant)
        return kl, penalised

    @staticmethod
    @_autograd.first_derivative_only("token_kl")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_kl, grad_reward = grads
        of_policy, of_reference, *_ = ctx.needs_input_grad
        grad = grad_ref = None
        if (of_policy or of_reference) and not (grad_kl is None and grad_reward is None):
            *columns, coeff = ctx.saved_tensors
            coeff = coeff if ctx.weight is None else ctx.weight
            columns = grad_kl, grad_reward, *columns
            grad = _gradient(columns, coeff, ctx.estimator, ctx.missing)
            # Every estimator depends on ref - log_probs only, hence the opposite signs.
            grad_ref = -grad if of_reference else None
        return grad, grad_ref, None, grad_reward, None, None, None, None


# Outside the transforms of torch.func, of which Function.apply would ask again.
_record: Callable[..., Any] = super(torch.autograd.Function, _Autograd).apply  # pyright: ignore[reportAttributeAccessIssue]


def _gradient(
    columns: tuple[Tensor | None, ...], coeff: float | Tensor, estimator: int, missing: bool
) -> Tensor:
    """That of the log-probs, where ``coeff`` is a number in one call.

    The columns are the upstream gradients of the KL and of the reward, the log-probs, the
    reference's, and the mask.
    """
    if not isinstance(coeff, Tensor):
        kernels = _kernels() if _has_memory() else None
        grad = kernels and kernels.backward(*columns, coeff, estimator, missing)
        if grad is not None:
            return grad
        coeff = torch.full((), coeff, dtype=torch.float64, device="cpu")
    # Asking first is cheaper than a copy of nothing.
    given = [x if x is None or x.is_contiguous() else x.contiguous() for x in columns]
    return torch.ops.fusedrl.token_kl_backward.default(*given, coeff, estimator, missing)


def _has_memory() -> bool:
    """Whether tensors are what they seem, and nothing else sees what is done with them.

    What is transformed has no memory of its own; a trace would keep the results as constants.
    """
    if in_trace_of_jit() or in_dispatch_mode():
        return False
    return not (transform_level() or in_forward_mode())


@cache
def _kernels() -> Any:
    """What computes on columns where they lie; ``None`` where it cannot find tensors' memory.

    Nor without the library of the CPU's ops, which is an error of the op.
    """
    functions = getattr(Tensor, _EXCHANGE, None)
    if functions is None or native.load_error("_C") is not None:
        return None
    from fusedrl import _host

    kernel = ctypes.CDLL(str(native.find("_C"))).fusedrl_token_kl
    address: Any = ctypes.cast(kernel, ctypes.c_void_p).value
    return _host.TokenKL(Tensor, functions, torch.empty_like, address)


def _fake(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    reward: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    shape = (0,) if reward is None else log_probs.shape
    return log_probs.new_empty(log_probs.shape), log_probs.new_empty(shape)


def _fake_backward(
    grad_kl: Tensor | None, grad_reward: Tensor | None, log_probs: Tensor, *rest: Any
) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


_dispatch.register_fakes({"token_kl": _fake, "token_kl_backward": _fake_backward})
