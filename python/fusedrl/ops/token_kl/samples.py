"""Lists of samples for ``token_kl``: read where they lie, or packed first."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fusedrl import native, ragged
from fusedrl.compat.torch import in_dispatch_mode, in_forward_mode, in_trace_of_jit, transform_level
from fusedrl.ops import _dispatch
from fusedrl.ops._samples import (
    COLUMNS,
    ONE_A_SAMPLE,
    PackedColumns,
    concatenated,
    pack_columns,
    sizes_of,
)

_EXCHANGE = "__dlpack_c_exchange_api__"  # torch's C functions of DLPack


def samples_in_one_call(
    log_probs: Any, ref_log_probs: Any, reward: Any, coeff: float | Tensor
) -> tuple[Tensor, Tensor | None, list[int]] | None:
    """The packed k1 of samples ``[T]``, to which a NaN is missing, and their lengths.

    Between them is the penalised reward, of rewards ``[T, 1]``. Packing the samples first would
    take fresh memory for every column, and the calls of torch more time than their tokens. ``None``
    for what does not fit, differs in dtype, is not contiguous, is not on the CPU, is of a subclass,
    inside a transform or a mode, and where a gradient is recorded: then pack them and call the op.
    """
    if not log_probs or type(log_probs[0]) is not Tensor or not log_probs[0].is_cpu:
        return None
    if torch.compiler.is_compiling() or not _has_memory() or (kernels := _kernels()) is None:
        return None
    weight = _dispatch.scalar_tensor("coeff", coeff, log_probs[0].device).item()
    lists = list(log_probs), list(ref_log_probs), None if reward is None else list(reward)
    return kernels.forward_samples(*lists, weight, torch.is_grad_enabled())


def pack_samples(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    reward: Sequence[Tensor] | Tensor | None = None,
) -> PackedColumns:
    """Pack the four columns, of which ``None`` stays so, to one value a token.

    Rewards are ``[T]``, ``[T, 1]``, or one value a sample (``[1]``, ``[1, 1]``, or a ``[B]``
    tensor). Raises ``ValueError`` naming the first sample whose shapes disagree, ``TypeError`` for
    one that is no tensor.
    """
    named = {"ref_log_probs": ref_log_probs} | ({} if mask is None else {"mask": mask})
    (policy, reference, *masks), lengths = pack_columns(log_probs, named)
    rewards = None if reward is None else _pack_rewards(reward, lengths)
    columns: list[Any] = [policy, reference, masks[0] if masks else None, rewards]
    return PackedColumns(columns, lengths)


def _pack_rewards(reward: Sequence[Tensor] | Tensor, lengths: list[int]) -> Tensor:
    if isinstance(reward, Tensor):
        if reward.shape not in ((len(lengths),), (len(lengths), 1)):
            raise ValueError(
                f"reward: expected shape ({len(lengths)},), one for each sample of a list, got "
                f"{tuple(reward.shape)}; pass a list where there is one for each token"
            )
        return _spread(reward, lengths)
    sizes = sizes_of("reward", reward)
    if len(sizes) != len(lengths):
        raise ValueError(
            f"reward: expected {len(lengths)} samples, got {len(sizes)}; {ONE_A_SAMPLE}"
        )
    of_samples = sizes != lengths and set(sizes) == {1}
    if sizes != lengths and not of_samples:
        _check_shapes(reward, lengths)
        reward = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=True)]
        sizes = lengths
    packed = concatenated("reward", reward, sizes)
    if packed.shape[1:] not in COLUMNS:
        _check_shapes(reward, lengths)
    return _spread(packed, lengths) if of_samples else packed.reshape(-1)


def _spread(rewards: Tensor, lengths: list[int]) -> Tensor:
    repeats = ragged.offsets_of(lengths, rewards.device).diff()
    return torch.repeat_interleave(rewards.flatten(), repeats, output_size=sum(lengths))


def _check_shapes(reward: Sequence[Tensor], lengths: list[int]) -> None:
    for i, (sample, n) in enumerate(zip(reward, lengths, strict=True)):
        if sample.numel() not in (1, n) or sample.dim() == 0 or sample.shape[1:] not in COLUMNS:
            raise ValueError(
                f"reward: sample {i}: expected shape [{n}], [{n}, 1], [1] or [1, 1], "
                f"got {tuple(sample.shape)}; give one value for each token, or one for the sample"
            )


def _has_memory() -> bool:
    """Whether tensors are what they seem, and nothing else sees what is done with them.

    What is transformed has no memory of its own; a trace would keep the results as constants.
    """
    if in_trace_of_jit() or in_dispatch_mode():
        return False
    return not (transform_level() or in_forward_mode())


@cache
def _kernels() -> Any:
    """What computes on samples where they lie; ``None`` where it cannot find tensors' memory.

    Nor without the library of the CPU's ops, which is an error of the op.
    """
    functions = getattr(Tensor, _EXCHANGE, None)
    if functions is None or native.load_error("_C") is not None:
        return None
    from fusedrl import _host

    kernel = ctypes.CDLL(str(native.find("_C"))).fusedrl_token_kl
    address: Any = ctypes.cast(kernel, ctypes.c_void_p).value
    return _host.TokenKL(Tensor, functions, address)
