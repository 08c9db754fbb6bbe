"""Lists of samples, one tensor each, for ``token_kl``: read where they lie, or packed first."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusedrl import native, ragged
from fusedrl.compat.torch import in_dispatch_mode, in_forward_mode, in_trace_of_jit, transform_level
from fusedrl.ops import _dispatch

_COLUMNS = (torch.Size(()), torch.Size((1,)))  # trailing dimensions of one value a row
_ONE_A_SAMPLE = "give one tensor for each sample"
_EXCHANGE = "__dlpack_c_exchange_api__"  # torch's C functions of DLPack


class PackedSamples(NamedTuple):
    """The columns of a list of samples, packed ``[N]``, and the lengths of the samples."""

    log_probs: Tensor
    ref_log_probs: Tensor
    mask: Tensor | None
    reward: Tensor | None
    lengths: list[int]


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
    weight = coeff
    if type(coeff) is not float or not abs(coeff) <= _dispatch.LARGEST:  # a tensor takes 5 us
        weight = _dispatch.scalar_tensor("coeff", coeff, log_probs[0].device).item()
    lists = list(log_probs), list(ref_log_probs), None if reward is None else list(reward)
    return kernels.forward_samples(*lists, weight, torch.is_grad_enabled())


def pack_samples(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    reward: Sequence[Tensor] | None = None,
) -> PackedSamples:
    """Pack 1-D samples to one value a token.

    Rewards are ``[T]``, ``[T, 1]``, or one value a sample (``[1]`` or ``[1, 1]``). Raises
    ``ValueError`` naming the first sample whose shapes disagree, ``TypeError`` for one that is no
    tensor.
    """
    if len(log_probs) == 0:
        raise ValueError(
            "log_probs: expected at least one sample, got an empty list; give all lists one tensor "
            "for each sample"
        )
    # With hundreds of short samples the loops over them take the time: there are few, and in C.
    lengths = _sizes_of("log_probs", log_probs)
    packed = _concatenated("log_probs", log_probs)
    if packed.dim() != 1:
        raise ValueError(
            f"log_probs: expected 1-D samples, got {tuple(log_probs[0].shape)}; "
            "flatten each with .flatten()"
        )
    return PackedSamples(
        packed,
        _packed_like(log_probs, lengths, "ref_log_probs", ref_log_probs),
        None if mask is None else _packed_like(log_probs, lengths, "mask", mask),
        None if reward is None else _pack_rewards(reward, lengths),
        lengths,
    )


def _sizes_of(name: str, column: Sequence[Tensor]) -> list[int]:
    """The number of elements of each sample."""
    try:
        return list(map(Tensor.numel, column))
    except TypeError:
        for i, sample in enumerate(column):
            _dispatch.check_tensor(f"{name}: sample {i}", sample)
        raise


def _packed_like(
    log_probs: Sequence[Tensor], lengths: list[int], name: str, column: Sequence[Tensor]
) -> Tensor:
    if len(column) != len(lengths):
        raise ValueError(
            f"{name}: expected {len(lengths)} samples, got {len(column)}; {_ONE_A_SAMPLE}"
        )
    if _sizes_of(name, column) == lengths:
        packed = _concatenated(name, column)
        if packed.dim() == 1:
            return packed
    i, x, y = next(
        (i, x, y)
        for i, (x, y) in enumerate(zip(log_probs, column, strict=True))
        if x.shape != y.shape
    )
    raise ValueError(
        f"{name}: sample {i}: expected shape {tuple(x.shape)} as in log_probs, got "
        f"{tuple(y.shape)}; {_dispatch.ONE_A_TOKEN}"
    )


def _concatenated(name: str, column: Sequence[Tensor]) -> Tensor:
    """The samples of a column, one after the other in one tensor."""
    try:
        return torch.cat(tuple(column))
    except RuntimeError as error:
        raise ValueError(
            f"{name}: expected samples that torch.cat takes, got some of which it says: {error}; "
            "give all one dtype, device, layout and number of dimensions"
        ) from error


def _pack_rewards(reward: Sequence[Tensor], lengths: list[int]) -> Tensor:
    sizes = _sizes_of("reward", reward)
    if len(sizes) != len(lengths):
        raise ValueError(
            f"reward: expected {len(lengths)} samples, got {len(sizes)}; {_ONE_A_SAMPLE}"
        )
    of_samples = sizes != lengths and set(sizes) == {1}
    if sizes != lengths and not of_samples:
        _check_shapes(reward, lengths)
        reward = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=True)]
        sizes = lengths
    packed = _concatenated("reward", reward)
    if packed.shape[1:] not in _COLUMNS:
        _check_shapes(reward, lengths)
    if not of_samples:
        return packed.reshape(-1)
    repeats = ragged.offsets_of(lengths, packed.device).diff()
    return torch.repeat_interleave(packed.flatten(), repeats, output_size=sum(lengths))


def _check_shapes(reward: Sequence[Tensor], lengths: list[int]) -> None:
    for i, (sample, n) in enumerate(zip(reward, lengths, strict=True)):
        if sample.numel() not in (1, n) or sample.dim() == 0 or sample.shape[1:] not in _COLUMNS:
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
