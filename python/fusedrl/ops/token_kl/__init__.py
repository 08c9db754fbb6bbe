"""Per-token KL estimates between a policy and its reference, and the reward they penalise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _autograd, _dispatch, _rows, _saved_tensors
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._samples import PackedColumns, check_lists
from fusedrl.ops.token_kl import in_place, reference
from fusedrl.ops.token_kl.columns import gradient_by_op, of_columns
from fusedrl.ops.token_kl.samples import pack_samples

__all__ = ["ESTIMATORS", "TokenKL", "kl_of_lists", "pack_samples", "token_kl"]

ESTIMATORS = ("k1", "k2", "k3", "abs")
_DTYPES = (*_dispatch.KERNEL_DTYPES, torch.float64)


class TokenKL(NamedTuple):
    """Per-token KL in nats and the penalised reward, in the representation of the input."""

    kl: Any
    reward: Any


def token_kl(
    log_probs: Tensor | Sequence[Tensor],
    ref_log_probs: Tensor | Sequence[Tensor],
    mask: Tensor | Sequence[Tensor] | None = None,
    *,
    offsets: Tensor | None = None,
    estimator: str = "k1",
    reward: Tensor | Sequence[Tensor] | None = None,
    coeff: float | Tensor = 1.0,
    nan: str = "propagate",
    impl: str = "auto",
) -> Any:
    r"""Per-token estimate of the KL divergence of the policy from the reference.

    With ``d = ref_log_probs - log_probs`` the estimators are k1 :math:`-d`, k2 :math:`d^2/2`,
    k3 :math:`e^d - 1 - d` and abs :math:`|d|` (Schulman, "Approximating KL divergence", 2020).
    Given ``reward``, the same pass computes ``reward - coeff * kl``.

    Args:
        log_probs: float log-probs of the policy in nats: a tensor of any shape, such as ``[N]`` or
            ``[B, T]``, a jagged or strided nested tensor, or a list of 1-D tensors, one for each
            sample.
        ref_log_probs: the reference's, in the same form.
        mask: bool in the same form; ``None`` keeps all. A dropped token has KL exactly 0, keeps its
            reward, and its log-probs are not read.
        offsets: int64 ``[B + 1]``, where each sequence of packed ``[N]`` values starts and ends;
            needed to broadcast a ``[B]`` reward.
        estimator: ``"k1"``, ``"k2"``, ``"k3"`` or ``"abs"``.
        reward: shaped like the log-probs, or ``[B]``, one value broadcast over each sequence. For a
            list also a list of ``[T]``, ``[T, 1]``, ``[1]`` or ``[1, 1]`` tensors. Where B equals N
            for packed ``[N]`` values, ``[B, 1]`` is of sequences and ``[1, N]`` of tokens, and one
            dimension alone is refused, unless every sequence has one token.
        coeff: weight of the KL in the reward, from -1e30 to 1e30. Pass a 0-dim tensor, on the CPU
            or beside the log-probs, to vary it under ``torch.compile`` without a recompile. No
            gradient flows to it.
        nan: ``"propagate"`` a NaN, or take it as ``"missing"``: the KL then is 0 where either
            log-prob is NaN.
        impl: ``"auto"`` takes the device's compiled kernel, or plain torch where there is none;
            ``"cpu"`` and ``"cuda"`` insist on the kernel, ``"reference"`` on plain torch.

    Returns:
        The KL in the form of ``log_probs`` and in its dtype; with ``reward``, :class:`TokenKL`.
        The tensors of a returned list are views of one buffer.

    Raises:
        TypeError: a mask that is not bool, values that are not floating point, arguments of
            different forms, a sparse tensor, a coeff that is no real number.
        ValueError: an unknown estimator, shapes, devices and offsets that do not fit, or a coeff
            out of range, which is not checked in a compiled graph, nor on the GPU.
        NotImplementedError: a forward-mode tangent, which only ``impl="reference"`` takes.

    Example:
        >>> import torch
        >>> from fusedrl import token_kl
        >>> policy, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.25])
        >>> token_kl(policy, ref)
        tensor([ 0.5000, -1.0000, -0.2500])
        >>> offsets, one_a_sequence = torch.tensor([0, 2, 3]), torch.tensor([1.0, 2.0])
        >>> kl, reward = token_kl(policy, ref, offsets=offsets, reward=one_a_sequence, coeff=0.1)
        >>> reward
        tensor([0.9500, 1.1000, 2.0250])
    """
    _check_options(estimator, nan)
    if type(log_probs) is Tensor and log_probs.is_cpu and impl in ("auto", "cpu"):
        number, missing = ESTIMATORS.index(estimator), nan == "missing"
        found = of_columns(log_probs, ref_log_probs, mask, offsets, reward, coeff, number, missing)
        if found is not None:
            return found[0] if found[1] is None else TokenKL._make(found)
    options = {"estimator": estimator, "coeff": coeff, "nan": nan, "impl": impl}
    return _of_any_form(log_probs, ref_log_probs, mask, offsets, reward, options)


@accepts_nested("ref_log_probs", per_sequence="reward", form="[B, j]", fields=("kl", "reward"))
def _of_any_form(
    log_probs: Any,
    ref_log_probs: Any,
    mask: Any,
    offsets: Any,
    reward: Any,
    options: dict[str, Any],
) -> Any:
    if isinstance(log_probs, (list, tuple)):
        return _list(log_probs, ref_log_probs, mask, offsets, reward, options)
    _dispatch.check_tensor("log_probs", log_probs, _dispatch.DENSE, _dispatch.NESTED)
    kl, penalised = _dense(log_probs, ref_log_probs, mask, offsets, reward, options)
    return kl if penalised is None else TokenKL(kl, penalised)


def _list(
    log_probs: Sequence[Tensor],
    ref_log_probs: Any,
    mask: Any,
    offsets: Tensor | None,
    reward: Any,
    options: dict[str, Any],
) -> Any:
    if offsets is not None:
        raise ValueError(
            f"offsets: expected None with a list, whose samples have lengths, got "
            f"{_dispatch.kind(offsets)}; leave it out"
        )
    lists = {"ref_log_probs": ref_log_probs}
    lists |= {} if mask is None else {"mask": mask}
    lists |= {} if reward is None or isinstance(reward, Tensor) else {"reward": reward}
    check_lists(**lists)
    if not any(map(len, (log_probs, *lists.values()))):
        return [] if reward is None else TokenKL([], [])
    columns, lengths = kl_of_lists(log_probs, ref_log_probs, mask, reward, **options)
    kl, *penalised = (list(column.split(lengths)) for column in columns)
    return TokenKL(kl, *penalised) if penalised else kl


def kl_of_lists(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    reward: Sequence[Tensor] | Tensor | None = None,
    *,
    estimator: str = "k1",
    coeff: float | Tensor = 1.0,
    nan: str = "propagate",
    impl: str = "auto",
    integer_rewards: bool = False,
) -> PackedColumns:
    """:func:`token_kl` of lists: the packed KL and, with ``reward``, the packed penalised reward.

    The samples are read where they lie, or packed first where they cannot be.
    ``integer_rewards`` takes rewards of no floating-point dtype in that of the log-probs.
    """
    options = {"estimator": estimator, "coeff": coeff, "nan": nan, "impl": impl}
    found = _in_place(log_probs, ref_log_probs, mask, reward, options)
    if found is not None:
        return found
    (p, q, kept, rewards), lengths = pack_samples(log_probs, ref_log_probs, mask, reward)
    if integer_rewards and rewards is not None and not rewards.is_floating_point():
        rewards = rewards.to(p.dtype)
    offsets = ragged.offsets_of(lengths, p.device)
    if rewards is not None and len(rewards) == len(p):
        rewards = rewards[None]  # of tokens, also where there are as many samples
    kl, penalised = _dense(p, q, kept, offsets, rewards, options)
    return PackedColumns([kl] if penalised is None else [kl, penalised], lengths)


def _in_place(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None,
    reward: Sequence[Tensor] | Tensor | None,
    options: dict[str, Any],
) -> PackedColumns | None:
    first = log_probs[0] if log_probs else None
    if type(first) is not Tensor or first.dtype not in _DTYPES or options["impl"] == "reference":
        return None
    if isinstance(reward, Tensor):
        if reward.shape != (len(log_probs),):
            return None
        reward = reward.split(1)
    run = in_place.implementation_of(first.device)
    if run is None:
        return None
    impl, estimator = options["impl"], ESTIMATORS.index(options["estimator"])
    if _dispatch.choose(impl, "token_kl", first.device, first.dtype, _DTYPES) == "reference":
        return None
    columns = (log_probs, ref_log_probs, mask, reward)
    return run(*columns, options["coeff"], estimator, options["nan"] == "missing")


def _dense(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    reward: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    _check(log_probs, ref_log_probs, mask, offsets)
    dtype = work = torch.promote_types(log_probs.dtype, ref_log_probs.dtype)
    if reward is not None:
        reward = _broadcast_reward(reward, log_probs, offsets)
        work = torch.promote_types(dtype, reward.dtype)
        reward = _contiguous(reward, work)
    log_probs, ref_log_probs = _contiguous(log_probs, work), _contiguous(ref_log_probs, work)
    chosen = _dispatch.choose(options["impl"], "token_kl", log_probs.device, work, _DTYPES)
    coeff = _dispatch.scalar_tensor("coeff", options["coeff"], log_probs.device)
    missing = options["nan"] == "missing"
    if chosen == "reference":
        kl, penalised = reference.token_kl(
            log_probs, ref_log_probs, mask, offsets, reward, coeff, options["estimator"], missing
        )
        return kl.to(dtype), penalised
    args = (
        log_probs,
        ref_log_probs,
        None if mask is None else mask.contiguous(),
        None if offsets is None else _contiguous(offsets, torch.int64),
        reward,
        coeff,
        ESTIMATORS.index(options["estimator"]),
        missing,
    )
    if _autograd.needs_grad(
        log_probs=log_probs, ref_log_probs=ref_log_probs, reward=reward, coeff=coeff
    ):
        kl, penalised = _autograd.apply(_Autograd, *args)
    else:
        kl, penalised = torch.ops.fusedrl.token_kl.default(*args)
    return kl if work == dtype else kl.to(dtype), None if reward is None else penalised


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Asking first is cheaper than a conversion that has nothing to do.
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


def _broadcast_reward(reward: Tensor, log_probs: Tensor, offsets: Tensor | None) -> Tensor:
    """``reward`` shaped like the log-probs, or still ``[B]`` where the kernel broadcasts it."""
    _dispatch.check_tensor("reward", reward, like=" like log_probs")
    _dispatch.check_device("reward", reward, log_probs.device)
    _dispatch.check_floating("reward", reward)
    if reward.shape == log_probs.shape and offsets is None:
        return reward
    if offsets is not None:
        shape, count = log_probs.shape, len(offsets) - 1
        of_sequences = _rows.is_of_sequences("reward", reward, shape, count, offsets)
        if of_sequences is False:
            return reward.reshape(shape)
        if of_sequences and (reward.requires_grad or count == len(log_probs)):
            lengths = offsets.diff()
            return reward.flatten().repeat_interleave(lengths, output_size=len(log_probs))
        if of_sequences:
            return reward.flatten()
    if log_probs.dim() == 2 and reward.shape in (log_probs.shape[:1], (len(log_probs), 1)):
        return reward.view(-1, 1).expand(log_probs.shape)
    sequences = "" if offsets is None else f", or ({len(offsets) - 1},), one for each sequence"
    to_broadcast = "" if offsets is not None else ", or offsets beside one for each sequence"
    raise ValueError(
        f"reward: expected shape {tuple(log_probs.shape)} like log_probs{sequences}, got "
        f"{tuple(reward.shape)}; {_dispatch.ONE_A_TOKEN}{to_broadcast}"
    )


def _check_options(estimator: str, nan: str) -> None:
    _dispatch.check_choice("estimator", estimator, ESTIMATORS)
    _dispatch.check_choice("nan", nan, _dispatch.NANS)


def _check(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None, offsets: Tensor | None
) -> None:
    for name, value in (("log_probs", log_probs), ("ref_log_probs", ref_log_probs)):
        _dispatch.check_tensor(name, value, like="" if value is log_probs else " like log_probs")
        _dispatch.check_floating(name, value)
    shape, device, like = log_probs.shape, log_probs.device, " like log_probs"
    _dispatch.check_same("ref_log_probs", ref_log_probs, shape, device, like)
    _dispatch.check_mask(mask, shape, device, like)
    if offsets is not None and log_probs.dim() != 1:
        raise ValueError(
            f"offsets: expected packed log_probs [N] beside it, got {tuple(log_probs.shape)}; "
            "leave it out, or flatten what has no padding"
        )
    _dispatch.check_offsets(offsets, log_probs.numel(), log_probs.device)


class _Autograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        log_probs, ref_log_probs, mask, _, reward, coeff, estimator, missing = args
        kl, penalised = torch.ops.fusedrl.token_kl.default(*args)
        ctx.set_materialize_grads(False)
        _saved_tensors.save(ctx, log_probs, ref_log_probs, mask, coeff)
        ctx.options = (estimator, missing)
        ctx.penalised = reward is not None
        constant = []
        if not (ctx.needs_input_grad[0] or ctx.needs_input_grad[1]):
            constant.append(kl)
        if reward is None:
            constant.append(penalised)
        ctx.mark_non_differentiable(*constant)
        return kl, penalised

    @staticmethod
    @_autograd.first_derivative_only("token_kl")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_kl, grad_reward = grads
        of_reward = grad_reward if ctx.penalised else None
        of_pair = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if not of_pair or (grad_kl is None and of_reward is None):
            return None, None, None, None, of_reward, None, None, None
        log_probs, ref_log_probs, mask, coeff = _saved_tensors.saved(ctx)
        columns = grad_kl, of_reward, log_probs, ref_log_probs, mask
        grad = gradient_by_op(columns, coeff, *ctx.options)
        # Every estimator depends on ref - log_probs only, hence the opposite signs.
        grad_ref = -grad if ctx.needs_input_grad[1] else None
        return grad, grad_ref, None, None, of_reward, None, None, None


def _fake(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    reward: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    return log_probs.new_empty(log_probs.shape), log_probs.new_empty(
        (0,) if reward is None else log_probs.shape
    )


def _fake_list(
    log_probs: list[Tensor],
    ref_log_probs: list[Tensor],
    mask: list[Tensor],
    reward: list[Tensor],
    *options: Any,
) -> tuple[Tensor, Tensor]:
    tokens = sum(sample.numel() for sample in log_probs)
    first = log_probs[0]
    return first.new_empty((tokens,)), first.new_empty((tokens if reward else 0,))


def _fake_backward(
    grad_kl: Tensor | None, grad_reward: Tensor | None, log_probs: Tensor, *rest: Any
) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


_dispatch.register_fakes(
    {"token_kl": _fake, "token_kl_list": _fake_list, "token_kl_backward": _fake_backward}
)
