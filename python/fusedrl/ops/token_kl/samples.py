"""Lists of samples for ``token_kl``: packed, a concatenation a column, or read where they lie."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from fusedrl.ops._dispatch import check_device, check_tensor

_FAST_CAT = 32767
_COLUMNS = (torch.Size(()), torch.Size((1,)))  # trailing dimensions of one value a row
# On the CPU a concatenation is cheaper than a handle for each tensor, which a list of them takes.
_DEVICES_IN_PLACE = {"cuda"}


class PackedSamples(NamedTuple):
    """Samples packed along the first dimension; ``lengths`` are the host-side sequence lengths."""

    log_probs: Tensor
    ref_log_probs: Tensor
    mask: Tensor | None
    reward: Tensor | None
    lengths: list[int]


def device_reads_in_place(log_probs: Sequence[Tensor]) -> bool:
    """Whether ``token_kl_list`` is for the device of these samples."""
    first = log_probs[0] if log_probs else None
    return isinstance(first, Tensor) and first.device.type in _DEVICES_IN_PLACE


def may_read_in_place(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None,
    reward: Sequence[Tensor] | None,
) -> bool:
    """Whether to try ``token_kl_list``, which reads samples where they lie.

    The first samples tell about dtypes and memory, since to ask all of them here would take as long
    as to concatenate them: the op itself refuses lists that do not fit behind these.
    """
    # What is traced or transformed has no memory of its own, and subclasses need not have.
    if torch.compiler.is_compiling() or maybe_current_level() or forward_ad._current_level >= 0:
        return False
    values = [log_probs, ref_log_probs, *([] if reward is None else [reward])]
    columns = [*values, *([] if mask is None else [mask])]
    if any(set(map(type, column)) != {Tensor} for column in columns):
        return False
    if not all(column[0].is_contiguous() for column in columns):
        return False
    if len({column[0].dtype for column in values}) > 1:
        return False
    return not (torch.is_grad_enabled() and any(x.requires_grad for x in chain(*values)))


def pack_samples(
    log_probs: Sequence[Tensor],
    ref_log_probs: Sequence[Tensor],
    mask: Sequence[Tensor] | None = None,
    reward: Sequence[Tensor] | Tensor | None = None,
) -> PackedSamples:
    """Pack lists of samples for :func:`token_kl`, one concatenation each.

    Rewards are ``[T]``, ``[T, 1]``, or one value a sample (``[1]``, ``[1, 1]``, or a ``[B]``
    tensor); all of one value stay ``[B]``, otherwise they are broadcast to ``[N]``. Raises
    ``ValueError`` naming the first sample whose shapes disagree, ``TypeError`` for one that is no
    tensor.
    """
    if len(log_probs) == 0:
        raise ValueError("log_probs: expected at least one sample, got an empty list")
    # Hundreds of short samples spend their time in loops over them, hence few and in C.
    lengths = _sizes("log_probs", log_probs)
    packed = _concatenated("log_probs", log_probs, lengths)
    if packed.dim() != 1:
        raise ValueError(f"log_probs: expected 1-D samples, got {tuple(log_probs[0].shape)}")
    columns = {"ref_log_probs": ref_log_probs} | ({} if mask is None else {"mask": mask})
    companions = [_packed_like(log_probs, lengths, *column) for column in columns.items()]
    return PackedSamples(
        packed,
        companions[0],
        companions[1] if len(companions) > 1 else None,
        None if reward is None else _pack_rewards(reward, lengths),
        lengths,
    )


def _sizes(name: str, column: Sequence[Tensor]) -> list[int]:
    try:
        return list(map(Tensor.numel, column))
    except TypeError:
        for i, sample in enumerate(column):
            check_tensor(f"{name}: sample {i}", sample)
        raise


def _packed_like(
    log_probs: Sequence[Tensor], lengths: list[int], name: str, column: Sequence[Tensor]
) -> Tensor:
    if len(column) != len(lengths):
        raise ValueError(f"{name}: expected {len(lengths)} samples, got {len(column)}")
    if _sizes(name, column) == lengths:
        packed = _concatenated(name, column, lengths)
        if packed.dim() == 1:
            return packed
    i, x, y = next(
        (i, x, y)
        for i, (x, y) in enumerate(zip(log_probs, column, strict=True))
        if x.shape != y.shape
    )
    raise ValueError(
        f"{name}: sample {i}: expected shape {tuple(x.shape)} as in log_probs, got {tuple(y.shape)}"
    )


def _pack_rewards(reward: Sequence[Tensor] | Tensor, lengths: list[int]) -> Tensor:
    # Where there are as many samples as tokens, [B] would be taken for one reward a token.
    ambiguous = len(lengths) == sum(lengths)
    if isinstance(reward, Tensor):
        if not ambiguous or reward.shape != (len(lengths),):
            return reward
        reward = list(reward.split(1))
    sizes = _sizes("reward", reward)
    if len(sizes) != len(lengths):
        raise ValueError(f"reward: expected {len(lengths)} samples, got {len(sizes)}")
    if sizes != lengths and (ambiguous or any(size != 1 for size in sizes)):
        _check_reward_shapes(reward, lengths)
        reward = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=True)]
        sizes = lengths
    packed = _concatenated("reward", reward, sizes)
    if packed.shape[1:] not in _COLUMNS:
        _check_reward_shapes(reward, lengths)
    return packed.reshape(-1)


def _check_reward_shapes(reward: Sequence[Tensor], lengths: list[int]) -> None:
    for i, (sample, n) in enumerate(zip(reward, lengths, strict=True)):
        if sample.numel() not in (1, n) or sample.dim() == 0 or sample.shape[1:] not in _COLUMNS:
            raise ValueError(
                f"reward: sample {i}: expected shape [{n}], [{n}, 1], [1] or [1, 1], "
                f"got {tuple(sample.shape)}"
            )


def _concatenated(name: str, column: Sequence[Tensor], lengths: list[int]) -> Tensor:
    try:
        if _cat_is_slow(column, lengths):
            return _cat_in_pieces(column, lengths)
        return torch.cat(tuple(column))
    except RuntimeError as error:
        _explain(name, column)
        raise ValueError(f"{name}: expected samples to concatenate: {error}") from error


def _explain(name: str, column: Sequence[Tensor]) -> None:
    """Raise for the first sample that cannot stand behind sample 0."""
    first = column[0]
    for i, sample in enumerate(column):
        check_tensor(f"{name}: sample {i}", sample)
        check_device(f"{name}: sample {i}", sample, first.device)
        if sample.dim() == 0:
            raise ValueError(
                f"{name}: sample {i}: expected a dimension of tokens, got shape (); "
                "add it with .unsqueeze(0)"
            )
        if sample.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"{name}: sample {i}: expected trailing dimensions {tuple(first.shape[1:])} as in "
                f"sample 0, got shape {tuple(sample.shape)}"
            )


def _cat_is_slow(column: Sequence[Tensor], lengths: list[int]) -> bool:
    """Whether torch.cat would copy these one by one, at microseconds each, and pieces can help.

    On the CPU it does so for results from 32768 elements on, where several threads may run.
    """
    return (
        not torch.compiler.is_compiling()
        and column[0].device.type == "cpu"
        and torch.get_num_threads() > 1
        and sum(lengths) > _FAST_CAT > max(lengths)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in column))
        and forward_ad._current_level < 0
        and len({(x.dtype, x.shape[1:]) for x in column}) == 1
        and column[0].shape[1:] in _COLUMNS
    )


def _cat_in_pieces(column: Sequence[Tensor], lengths: list[int]) -> Tensor:
    """Concatenate into slices of one buffer, each small enough for a single loop.

    Assumes one element a row, and that no sample alone is too large.
    """
    ends = list(accumulate(lengths))
    packed = column[0].new_empty((ends[-1], *column[0].shape[1:]))
    first = start = 0
    while first < len(column):
        past = bisect_right(ends, start + _FAST_CAT)
        end = ends[past - 1]
        torch.cat(tuple(column[first:past]), out=packed[start:end])
        first, start = past, end
    return packed
