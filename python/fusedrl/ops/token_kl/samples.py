"""Lists of samples for ``token_kl``, packed with a concatenation for each column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops._samples import (
    COLUMNS,
    ONE_A_SAMPLE,
    PackedColumns,
    concatenated,
    pack_columns,
    sizes_of,
)


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
