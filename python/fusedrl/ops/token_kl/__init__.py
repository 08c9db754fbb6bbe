"""Per-token KL estimates between a policy and its reference, and the reward they penalise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, overload

import torch
from torch import Tensor
from typing_extensions import NamedTuple, TypeVar

from fusedrl.ops import _dispatch, _rows
from fusedrl.ops._nested import accepts_nested
from fusedrl.ops._samples import check_lists
from fusedrl.ops.token_kl import columns, reference
from fusedrl.ops.token_kl.samples import pack_samples

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fusedrl.ops._options import EstimateOptions

__all__ = ["ESTIMATORS", "TokenKL", "pack_samples", "token_kl"]

ESTIMATORS = ("k1", "k2", "k3", "abs")
_DTYPES = (*_dispatch.KERNEL_DTYPES, torch.float64)


Values = TypeVar("Values", default=Tensor)


class TokenKL(NamedTuple, Generic[Values]):
    """Per-token KL in nats and the penalised reward, in the representation of the input.

    Both are lists of tensors where the input is a list.
    """

    kl: Values
    reward: Values


@overload
def token_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    reward: None = None,
    **options: Unpack[EstimateOptions],
) -> Tensor: ...
@overload
def token_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None = None,
    *,
    reward: Tensor,
    **options: Unpack[EstimateOptions],
) -> TokenKL: ...
@overload
def token_kl(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    *,
    reward: None = None,
    **options: Unpack[EstimateOptions],
) -> list[Tensor]: ...
@overload
def token_kl(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    *,
    reward: Tensor | Sequence[Tensor],
    **options: Unpack[EstimateOptions],
) -> TokenKL[list[Tensor]]: ...
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
    _dispatch.check_choice("estimator", estimator, ESTIMATORS)
    _dispatch.check_choice("nan", nan, _dispatch.NANS)
    if type(log_probs) is Tensor and log_probs.is_cpu and impl in ("auto", "cpu"):
        given = log_probs, ref_log_probs, mask, offsets, reward, coeff
        found = columns.in_one_call(*given, ESTIMATORS.index(estimator), nan == "missing")
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
        return _of_list(log_probs, ref_log_probs, mask, offsets, reward, options)
    _dispatch.check_tensor("log_probs", log_probs, _dispatch.DENSE, _dispatch.NESTED)
    kl, penalised = _dense(log_probs, ref_log_probs, mask, offsets, reward, options)
    return kl if penalised is None else TokenKL(kl, penalised)


def _of_list(
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
        return [] if reward is None else TokenKL._make(([], []))
    (p, q, kept, rewards), lengths = pack_samples(log_probs, ref_log_probs, mask, reward)
    result = token_kl(p, q, kept, reward=rewards, **options)
    if isinstance(result, Tensor):
        return list(result.split(lengths))
    return TokenKL._make(list(column.split(lengths)) for column in result)


def _dense(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor | None,
    offsets: Tensor | None,
    reward: Tensor | None,
    options: dict[str, Any],
) -> columns.Results:
    _check(log_probs, ref_log_probs, mask, offsets)
    dtype = work = torch.promote_types(log_probs.dtype, ref_log_probs.dtype)
    if reward is not None:
        reward = _one_a_token(reward, log_probs, offsets)
        work = torch.promote_types(dtype, reward.dtype)
        reward = _contiguous(reward, work)
    log_probs, ref_log_probs = _contiguous(log_probs, work), _contiguous(ref_log_probs, work)
    mask = None if mask is None else mask.contiguous()
    chosen = _dispatch.choose(options["impl"], "token_kl", log_probs.device, work, _DTYPES)
    coeff = _dispatch.scalar_tensor("coeff", options["coeff"], log_probs.device)
    given = log_probs, ref_log_probs, mask, reward, coeff
    missing = options["nan"] == "missing"
    if chosen == "reference":
        kl, penalised = reference.token_kl(*given, options["estimator"], missing)
    else:
        kl, penalised = columns.by_op(*given, ESTIMATORS.index(options["estimator"]), missing)
    return kl if work == dtype else kl.to(dtype), penalised


def _contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    # Asking first is cheaper than a conversion that has nothing to do.
    return (tensor if tensor.dtype == dtype else tensor.to(dtype)).contiguous()


def _one_a_token(reward: Tensor, log_probs: Tensor, offsets: Tensor | None) -> Tensor:
    """``reward`` shaped like the log-probs, for which those of sequences are repeated."""
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
        if of_sequences:
            lengths = offsets.diff()
            return reward.flatten().repeat_interleave(lengths, output_size=len(log_probs))
    if log_probs.dim() == 2 and reward.shape in (log_probs.shape[:1], (len(log_probs), 1)):
        return reward.view(-1, 1).expand(log_probs.shape)
    sequences = "" if offsets is None else f", or ({len(offsets) - 1},), one for each sequence"
    to_broadcast = "" if offsets is not None else ", or offsets beside one for each sequence"
    raise ValueError(
        f"reward: expected shape {tuple(log_probs.shape)} like log_probs{sequences}, got "
        f"{tuple(reward.shape)}; {_dispatch.ONE_A_TOKEN}{to_broadcast}"
    )


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
