"""Lists of samples for ``token_kl``: packed, a concatenation a column, or read where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad

from fusedrl.ops._samples import COLUMNS, concatenated, pack_columns, sizes_of

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
    columns = {"ref_log_probs": ref_log_probs} | ({} if mask is None else {"mask": mask})
    packed = pack_columns(log_probs, columns)
    return PackedSamples(
        packed.log_probs,
        packed.companions[0],
        None if mask is None else packed.companions[1],
        None if reward is None else _pack_rewards(reward, packed.lengths),
        packed.lengths,
    )


def _pack_rewards(reward: Sequence[Tensor] | Tensor, lengths: list[int]) -> Tensor:
    # Where there are as many samples as tokens, [B] would be taken for one reward a token.
    ambiguous = len(lengths) == sum(lengths)
    if isinstance(reward, Tensor):
        if not ambiguous or reward.shape != (len(lengths),):
            return reward
        reward = list(reward.split(1))
    sizes = sizes_of("reward", reward)
    if len(sizes) != len(lengths):
        raise ValueError(f"reward: expected {len(lengths)} samples, got {len(sizes)}")
    if sizes != lengths and (ambiguous or any(size != 1 for size in sizes)):
        _check_reward_shapes(reward, lengths)
        reward = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=True)]
        sizes = lengths
    packed = concatenated("reward", reward, sizes)
    if packed.shape[1:] not in COLUMNS:
        _check_reward_shapes(reward, lengths)
    return packed.reshape(-1)


def _check_reward_shapes(reward: Sequence[Tensor], lengths: list[int]) -> None:
    for i, (sample, n) in enumerate(zip(reward, lengths, strict=True)):
        if sample.numel() not in (1, n) or sample.dim() == 0 or sample.shape[1:] not in COLUMNS:
            raise ValueError(
                f"reward: sample {i}: expected shape [{n}], [{n}, 1], [1] or [1, 1], "
                f"got {tuple(sample.shape)}"
            )
