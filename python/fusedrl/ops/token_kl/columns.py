"""``token_kl`` of packed or padded columns on the CPU, read where they lie.

The checks of the public function, torch's dispatcher, and an autograd function around it would take
longer than thousands of tokens. One call finds the columns' memory, allocates and computes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedrl import native
from fusedrl.ops import _autograd, _dispatch, _saved_tensors
from fusedrl.ops.token_kl import in_place


def of_columns(
    log_probs: Tensor,
    ref_log_probs: Any,
    mask: Any,
    offsets: Any,
    reward: Any,
    coeff: float | Tensor,
    estimator: int,
    missing: bool,
) -> tuple[Tensor, Tensor | None] | None:
    """The KL and, with ``reward``, the penalised reward, with their gradients.

    ``None`` for what does not fit, differs in dtype, is not contiguous, is of a subclass or inside
    a dispatch mode, of which the op knows what to say or to do.
    """
    if not in_place.has_memory() or torch._C._len_torch_dispatch_stack():
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
    of_reward = getattr(reward, "requires_grad", False)
    if not (log_probs.requires_grad or ref_log_probs.requires_grad or of_reward):
        return found
    if of_reward and reward.shape != log_probs.shape:
        return None  # it has to be spread over the tokens by what carries its gradient
    options = weight, estimator, missing
    return _record(log_probs, ref_log_probs, reward, (found, mask, options))


class _Autograd(torch.autograd.Function):
    """Records how results that are known, and that nothing else has, depend on the columns."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor | None]:
        log_probs, ref_log_probs, _, ((kl, penalised), mask, ctx.options) = args
        ctx.set_materialize_grads(False)
        _saved_tensors.save(ctx, log_probs, ref_log_probs, mask)
        if not (log_probs.requires_grad or ref_log_probs.requires_grad):
            ctx.mark_non_differentiable(kl)
        return kl, penalised

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _autograd.check_first_derivative("token_kl")
        grad_kl, grad_reward = grads
        of_policy, of_reference, _, _ = ctx.needs_input_grad
        if not (of_policy or of_reference) or (grad_kl is None and grad_reward is None):
            return None, None, grad_reward, None
        log_probs, ref_log_probs, mask = _saved_tensors.saved(ctx)
        weight, estimator, missing = ctx.options
        grad = None
        if not torch._C._len_torch_dispatch_stack():
            grad = _kernels().backward(
                grad_kl, grad_reward, log_probs, ref_log_probs, mask, weight, estimator, missing
            )
        if grad is None:  # a mode may have left something else of the tensors
            columns = grad_kl, grad_reward, log_probs, ref_log_probs, mask
            coeff = torch.full((), weight, dtype=torch.float64, device="cpu")
            grad = gradient_by_op(columns, coeff, estimator, missing)
        # Every estimator depends on ref - log_probs only, hence the opposite signs.
        return grad, -grad if of_reference else None, grad_reward, None


# Outside the transforms of torch.func, of which Function.apply would ask again.
_record: Callable[..., Any] = super(torch.autograd.Function, _Autograd).apply  # pyright: ignore[reportAttributeAccessIssue]


def gradient_by_op(
    columns: tuple[Tensor | None, ...], coeff: Tensor, estimator: int, missing: bool
) -> Tensor:
    """The gradient of the log-probs by the op, which takes contiguous columns.

    These are the upstream gradients of the KL and of the reward, both log-probs, and the mask.
    """
    # Asking first is cheaper than a copy of nothing.
    given = (x if x is None or x.is_contiguous() else x.contiguous() for x in columns)
    return torch.ops.fusedrl.token_kl_backward.default(*given, coeff, estimator, missing)


@cache
def _kernels() -> Any:
    """What computes on columns where they lie; ``None`` where it cannot find tensors' memory.

    Nor without the library of the CPU's ops, which is an error of the op.
    """
    functions = in_place.exchange_functions()
    if functions is None or native.load_error("_C") is not None:
        return None
    from fusedrl import _host

    library = in_place.library()
    kernels = library.fusedrl_token_kl_columns, library.fusedrl_token_kl_gradient
    addresses: Any = (ctypes.cast(kernel, ctypes.c_void_p).value for kernel in kernels)
    return _host.TokenColumns(Tensor, functions, torch.empty_like, *addresses)
