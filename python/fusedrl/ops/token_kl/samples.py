"""``token_kl`` of a list of samples in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedrl import native
from fusedrl.compat.torch import in_dispatch_mode, in_forward_mode, in_trace_of_jit, transform_level
from fusedrl.ops import _dispatch
from fusedrl.ops.token_kl import token_kl

_EXCHANGE = "__dlpack_c_exchange_api__"  # torch's C functions of DLPack


def kl_of_samples(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    reward: Sequence[Tensor] | None = None,
    mask: Sequence[Tensor] | None = None,
    *,
    coeff: float | Tensor,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """:func:`kl_and_reward` of each sample; the results are views of one buffer.

    Raises:
        ValueError: a column of a sample does not have the shape of its log-probs.
    """
    found = None if mask is not None else _without_packing(log_probs, ref_log_probs, reward, coeff)
    if found is None:
        shapes = [x.shape for x in log_probs]
        columns: list[Any] = [log_probs, ref_log_probs, None, mask]
        for name, column in (("ref_log_probs", ref_log_probs), ("mask", mask)):
            tensors = log_probs if column is None else column
            for i, (x, y) in enumerate(zip(shapes, tensors, strict=True)):
                if x != y.shape:
                    raise ValueError(
                        f"{name}: sample {i}: expected shape {tuple(x)} as in log_probs, got "
                        f"{tuple(y.shape)}; {_dispatch.ONE_A_TOKEN}"
                    )
        lengths = [len(x) for x in log_probs]
        packed: list[Any] = [None if x is None else torch.cat(list(x)) for x in columns]
        if reward is not None:
            packed[2] = _packed_rewards(log_probs, reward, lengths)
        found = *kl_and_reward(*packed, coeff=coeff), lengths
    kl, penalised, lengths = found
    # Without a gradient, autograd need not track the views, which makes them a fifth cheaper.
    split = torch.split_with_sizes if kl.requires_grad else torch.unsafe_split_with_sizes
    return list(split(kl, lengths)), None if penalised is None else list(split(penalised, lengths))


def kl_and_reward(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    reward: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    coeff: float | Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The k1 estimate of tokens ``[...]``, 0 for a NaN, and ``reward - coeff * kl``.

    A reward ``[..., columns]`` is broadcast to the log-probs: torchrl's rewards are ``[T, 1]`` or
    ``[1, 1]`` for a sample.
    """
    columns = log_probs, ref_log_probs, mask
    if reward is None:
        return token_kl(*columns, nan="missing")
    reward = _broadcast_reward("reward", log_probs, reward)
    if not reward.is_floating_point():
        reward = reward.to(log_probs.dtype)
    if reward.shape[-1] == 1:
        column = reward.squeeze(-1)
        kl, penalised = token_kl(*columns, reward=column, coeff=coeff, nan="missing")
        return kl, None if penalised is None else penalised.unsqueeze(-1)
    kl = token_kl(*columns, nan="missing").kl
    return kl, reward - coeff * kl.unsqueeze(-1)


def _packed_rewards(
    log_probs: Sequence[Tensor], reward: Sequence[Tensor], lengths: list[int]
) -> Tensor:
    # With hundreds of short samples, one call per sample would dominate the time.
    sizes = [r.shape[:-1] for r in reward]
    if sizes == [(n,) for n in lengths]:
        return torch.cat(list(reward))
    if sizes == [(1,)] * len(lengths) and log_probs[0].dim() == 1:
        repeats = torch.tensor(lengths, device=reward[0].device)
        return torch.cat(list(reward)).repeat_interleave(repeats, 0, output_size=sum(lengths))
    pairs = enumerate(zip(log_probs, reward, strict=True))
    return torch.cat([_broadcast_reward(f"reward: sample {i}", x, r) for i, (x, r) in pairs])


def _broadcast_reward(name: str, log_probs: Tensor, reward: Tensor) -> Tensor:
    if reward.dim() != log_probs.dim() + 1:
        raise ValueError(
            f"{name}: expected one more dimension than the log-probs, {(*log_probs.shape, 1)}, got "
            f"{tuple(reward.shape)}; add it with .unsqueeze(-1)"
        )
    return reward.expand(*log_probs.shape, reward.shape[-1])


def _without_packing(
    log_probs: Any, ref_log_probs: Any, reward: Any, coeff: float | Tensor
) -> tuple[Tensor, Tensor | None, list[int]] | None:
    """Results and lengths of samples ``[T]`` with rewards ``[T, 1]``, read without packing them.

    Packing allocates memory for every column, and its torch calls take more time than the kernel.
    ``None`` if this is not possible: other shapes or devices, mixed dtypes, tensors that are not
    contiguous or of a subclass, a torch transform or mode, or a recorded gradient.
    """
    if not log_probs or type(log_probs[0]) is not Tensor or not log_probs[0].is_cpu:
        return None
    # Transformed tensors have no storage; a trace would record the results as constants.
    if torch.compiler.is_compiling() or in_trace_of_jit() or in_dispatch_mode():
        return None
    if transform_level() or in_forward_mode() or (kernels := _kernels()) is None:
        return None
    weight = coeff
    if type(coeff) is not float or not abs(coeff) <= _dispatch.LARGEST:  # a tensor takes 5 us
        weight = _dispatch.scalar_tensor("coeff", coeff, log_probs[0].device).item()
    lists = list(log_probs), list(ref_log_probs), None if reward is None else list(reward)
    found = kernels.forward_samples(*lists, weight, torch.is_grad_enabled())
    return (
        found if found is None or reward is None else (found[0], found[1].unsqueeze(-1), found[2])
    )


@cache
def _kernels() -> Any:
    """Torch-free bindings of the kernel; ``None`` if torch has no DLPack exchange API."""
    functions = getattr(Tensor, _EXCHANGE, None)
    if functions is None or native.load_error("_C") is not None:
        return None
    from fusedrl import _host

    kernel = ctypes.CDLL(str(native.find("_C"))).fusedrl_token_kl
    address: Any = ctypes.cast(kernel, ctypes.c_void_p).value
    return _host.TokenKL(Tensor, functions, address)
