"""Per-token KL estimates between a policy and its reference, and the KL-penalised reward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl.ops import _autograd, _dispatch, _nested
from fusedrl.ops.token_kl import reference

__all__ = ["ESTIMATORS", "TokenKL", "token_kl"]

ESTIMATORS = ("k1", "k2", "k3", "abs")
_DTYPES = (*_dispatch.KERNEL_DTYPES, torch.float64)
_NO_OFFSETS = "leave offsets out if there is one reward per token"


class TokenKL(NamedTuple):
    """Per-token KL in nats and the penalised reward, both in the form of the log-probs.

    The reward is ``None`` if none was passed.
    """

    kl: Tensor
    reward: Tensor | None


def token_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    offsets: Tensor | None = None,
    estimator: str = "k1",
    reward: Tensor | None = None,
    coeff: float | Tensor = 1.0,
    nan: str = "propagate",
    impl: str = "auto",
) -> TokenKL:
    r"""Per-token estimate of the KL divergence of the policy from the reference.

    With ``d = ref_log_probs - log_probs`` the estimators are k1 :math:`-d`, k2 :math:`d^2/2`,
    k3 :math:`e^d - 1 - d` and abs :math:`|d|` (Schulman, "Approximating KL divergence", 2020).
    With ``reward``, the same pass computes ``reward - coeff * kl``.

    Args:
        log_probs: float log-probs of the policy in nats: a tensor of any shape, such as ``[N]`` or
            ``[B, T]``, or a jagged or strided nested tensor.
        ref_log_probs: the reference's, in the same form.
        mask: bool in the same form; ``None`` keeps all. A dropped token has KL exactly 0, keeps its
            reward, and its log-probs are not read.
        offsets: int64 ``[B + 1]``, where each sequence of packed ``[N]`` values starts and ends;
            with them, ``reward`` is one per sequence.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        reward: in the form of the log-probs, one per token; or ``[B]``, one per sequence, with
            packed values and ``offsets``, padded ``[B, T]`` or nested values.
        coeff: weight of the KL in the reward, from -1e30 to 1e30. Pass a 0-dim tensor, on the CPU
            or the device of the log-probs, to vary it under ``torch.compile`` without a recompile.
            No gradient flows to it.
        nan: ``"propagate"`` a NaN, or treat it as ``"missing"``: the KL is 0 if either log-prob is
            NaN.
        impl: ``"auto"`` uses the device's compiled kernel, or falls back to plain torch; ``"cpu"``
            and ``"cuda"`` require the kernel, ``"reference"`` uses plain torch.

    Returns:
        :class:`TokenKL`, in the form and the dtype of ``log_probs``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or value, or that does not fit the
            others. The range of ``coeff`` is not checked in a compiled graph or on the GPU.
        NotImplementedError: forward-mode differentiation without ``impl="reference"``.

    Example:
        >>> import torch
        >>> from fusedrl import token_kl
        >>> policy, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.25])
        >>> token_kl(policy, ref).kl
        tensor([ 0.5000, -1.0000, -0.2500])
        >>> offsets, one_a_sequence = torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0])
        >>> kl, reward = token_kl(policy, ref, offsets=offsets, reward=one_a_sequence, coeff=0.1)
        >>> reward
        tensor([0.9500, 1.1000, 2.0250])
    """
    _dispatch.check_choice("estimator", estimator, ESTIMATORS)
    _dispatch.check_choice("nan", nan, _dispatch.NANS)
    batch = _nested.pack("log_probs", log_probs, offsets, form="[B, j]")
    log_probs, offsets = batch.values, batch.offsets
    ref_log_probs = batch.companion("ref_log_probs", ref_log_probs)
    mask, like = batch.optional("mask", mask), " like log_probs"
    _dispatch.check_floating("log_probs", log_probs)
    _dispatch.check_tensor("ref_log_probs", ref_log_probs, like=like)
    _dispatch.check_floating("ref_log_probs", ref_log_probs)
    _dispatch.check_same("ref_log_probs", ref_log_probs, log_probs.shape, log_probs.device, like)
    _dispatch.check_mask(mask, log_probs.shape, log_probs.device, like)
    if offsets is not None and log_probs.dim() != 1:
        raise ValueError(
            f"offsets: expected packed log_probs [N] with it, got {tuple(log_probs.shape)}; "
            "leave it out, or flatten log_probs without padding"
        )
    _dispatch.check_offsets(offsets, log_probs.numel(), log_probs.device)
    dtype = work = torch.promote_types(log_probs.dtype, ref_log_probs.dtype)
    if reward is not None:
        nested = getattr(reward, "is_nested", False)
        one_each = batch.companion("reward", reward) if nested else reward
        reward = _reward_of_tokens(one_each, log_probs, None if nested else offsets)
        work = torch.promote_types(dtype, reward.dtype)
        reward = _contiguous(reward, work)
    log_probs, ref_log_probs = _contiguous(log_probs, work), _contiguous(ref_log_probs, work)
    mask = None if mask is None else mask.contiguous()
    chosen = _dispatch.choose(impl, "token_kl", log_probs.device, work, _DTYPES)
    weight = _dispatch.scalar_tensor("coeff", coeff, log_probs.device)
    given = log_probs, ref_log_probs, mask, reward, weight
    if chosen == "reference":
        kl, penalised = reference.token_kl(*given, estimator, nan == "missing")
    else:
        args = *given, ESTIMATORS.index(estimator), nan == "missing"
        inputs = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "reward": reward}
        if _autograd.needs_grad(**inputs, coeff=weight):
            kl, penalised = _autograd.apply(_Autograd, *args)
        else:
            kl, penalised = torch.ops.fusedrl.token_kl.default(*args)
        penalised = None if reward is None else penalised
    return TokenKL(batch.result(kl if work == dtype else kl.to(dtype)), batch.result(penalised))


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Comparing dtypes first is cheaper than a conversion that changes nothing.
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


def _reward_of_tokens(reward: Tensor, log_probs: Tensor, offsets: Tensor | None) -> Tensor:
    """``reward`` shaped like the log-probs; one per sequence is repeated."""
    _dispatch.check_tensor("reward", reward, like=" like log_probs")
    _dispatch.check_floating("reward", reward)
    like = " like log_probs"
    if offsets is not None:
        shape, like = offsets.diff().shape, ", one for each sequence of offsets"
        _dispatch.check_same("reward", reward, shape, log_probs.device, like, remedy=_NO_OFFSETS)
        return reward.repeat_interleave(offsets.diff(), output_size=len(log_probs))
    if log_probs.dim() == 2 and reward.shape == log_probs.shape[:1]:
        reward = reward[:, None].expand(log_probs.shape)
    _dispatch.check_same("reward", reward, log_probs.shape, log_probs.device, like)
    return reward


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        log_probs, ref_log_probs, mask, reward, coeff, ctx.estimator, ctx.missing = args
        kl, penalised = torch.ops.fusedrl.token_kl.default(*args)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_probs, ref_log_probs, mask, coeff)
        constant = [] if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else [kl]
        ctx.mark_non_differentiable(*constant, *([penalised] if reward is None else []))
        return kl, penalised

    @staticmethod
    @_autograd.first_derivative_only("token_kl")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of_policy, of_reference, *_ = ctx.needs_input_grad
        grad_kl, grad_reward = grads
        grad = grad_ref = None
        if (of_policy or of_reference) and not (grad_kl is None and grad_reward is None):
            *columns, coeff = ctx.saved_tensors
            columns = grad_kl, grad_reward, *columns
            # Checking first is cheaper than a call of contiguous() that copies nothing.
            given = [x if x is None or x.is_contiguous() else x.contiguous() for x in columns]
            backward = torch.ops.fusedrl.token_kl_backward.default
            grad = backward(*given, coeff, ctx.estimator, ctx.missing)
            # Every estimator depends only on ref - log_probs, hence the opposite signs.
            grad_ref = -grad if of_reference else None
        return grad, grad_ref, None, grad_reward, None, None, None


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
