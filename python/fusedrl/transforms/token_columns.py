"""Log-probs, mask and reward of a batch as columns of one form, in which ``token_kl`` runs once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from tensordict import NestedKey
from torch import Tensor

from fusedrl import ragged
from fusedrl.compat.torch import NestedTensor, lengths_beside_holes
from fusedrl.ops.token_kl import token_kl
from fusedrl.ops.token_kl.samples import pack_samples, samples_in_one_call
from fusedrl.transforms.columns import (
    Column,
    Columns,
    SampleColumns,
    column_rows,
    is_dense,
    is_nested,
)


class Places(NamedTuple):
    """Where packed tokens belong.

    Args:
        lengths: tokens of each sample.
        jagged: offsets ``[B + 1]`` of results that are jagged; ``None`` for strided ones.
        shapes: shapes of samples of several dimensions; ``None`` if all have one.
    """

    lengths: list[int]
    jagged: Tensor | None
    shapes: list[torch.Size] | None = None


class TokenColumns(NamedTuple):
    """Columns of one form: dense ``[B, T]``, or packed ``[N]``.

    Args:
        log_probs: the policy's.
        ref_log_probs: the reference's.
        mask: bool, the tokens that are kept; ``None`` for all.
        reward: floating point with one dimension more; ``None`` for none.
        places: where packed tokens belong; ``None`` for dense ones.
    """

    log_probs: Tensor
    ref_log_probs: Tensor
    mask: Tensor | None
    reward: Tensor | None
    places: Places | None

    def kl_and_reward(self, coeff: float | Tensor) -> tuple[Tensor, Tensor | None]:
        """The KL and, if there is a reward, ``reward - coeff * kl`` for each of its columns."""
        columns, reward = self[:3], self.reward
        if reward is not None and reward.shape[-1] == 1:
            one = reward.squeeze(-1)
            kl, penalised = token_kl(*columns, reward=one, coeff=coeff, nan="missing")
            return kl, None if penalised is None else penalised.unsqueeze(-1)
        kl = token_kl(*columns, nan="missing").kl
        return kl, None if reward is None else reward - coeff * kl.unsqueeze(-1)


def kl_of_samples(
    log_probs: Column, ref_log_probs: Column, reward: Column | None, coeff: float | Tensor
) -> tuple[Tensor, Tensor | None, Places | None]:
    """The KL and the penalised reward, with the places of their tokens.

    The samples of a list on the CPU are read where they lie, if they are rows of tokens.
    """
    if not any(isinstance(column, Tensor) for column in (log_probs, ref_log_probs, reward)):
        answer = samples_in_one_call(log_probs, ref_log_probs, reward, coeff)
        if answer is not None:
            kl, penalised, lengths = answer
            penalised = None if penalised is None else penalised.unsqueeze(-1)
            return kl, penalised, Places(lengths, _jagged_offsets(log_probs, reward, lengths))
    tokens = token_columns(log_probs, ref_log_probs, None, reward)
    return *tokens.kl_and_reward(coeff), tokens.places


def store(
    data: SampleColumns | Columns, key: NestedKey, values: Tensor, places: Places | None
) -> None:
    """Store ``values [..., columns]`` of tokens in the form of the data."""
    if places is None:
        data.set(key, values)
    elif places.shapes is None:
        data.set_packed(key, values, places.lengths, places.jagged)
    else:
        parts = zip(values.split(places.lengths), places.shapes, strict=True)
        rows = [part.reshape(*shape, *values.shape[1:]) for part, shape in parts]
        data.set(key, rows, torch.strided if places.jagged is None else torch.jagged)


def token_columns(
    log_probs: Column, ref_log_probs: Column, mask: Column | None, reward: Column | None
) -> TokenColumns:
    """The columns in one form: dense if all of them are, and packed otherwise.

    A reward ``[T, columns]`` of a sample, or ``[1, columns]``, which is repeated, has one dimension
    more than its log-probs. Raises ``ValueError`` for columns that do not fit each other.
    """
    given = [x for x in (log_probs, ref_log_probs, mask, reward) if x is not None]
    if all(map(is_dense, given)):
        dense: Any = log_probs, ref_log_probs, mask, reward
        found = _of_dense(*dense)
    elif (packed := _of_nested(log_probs, ref_log_probs, mask, reward)) is not None:
        found = packed
    else:
        rows, ref_rows = column_rows(log_probs), column_rows(ref_log_probs)
        masks = None if mask is None else column_rows(mask)
        found = _of_rows(rows, ref_rows, masks, None if reward is None else column_rows(reward))
    if found.places is not None:
        jagged = _jagged_offsets(log_probs, reward, found.places.lengths)
        found = found._replace(places=found.places._replace(jagged=jagged))
    mask, reward = found.mask, found.reward
    if reward is not None and not reward.is_floating_point():
        reward = reward.to(found.log_probs.dtype)
    return found._replace(mask=None if mask is None else mask.bool(), reward=reward)


def _of_dense(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None, reward: Tensor | None
) -> TokenColumns:
    if reward is not None:
        _check_reward("reward", log_probs, reward)
        reward = reward.expand(*log_probs.shape, reward.shape[-1])
    return TokenColumns(log_probs, ref_log_probs, mask, reward, None)


def _of_nested(*columns: Column | None) -> TokenColumns | None:
    """Nested columns as packed views; ``None`` unless all are nested with the same offsets."""
    given = [column for column in columns if column is not None]
    if not all(map(is_nested, given)):
        return None
    parts = [ragged.from_nested(column) for column in given]  # pyright: ignore[reportArgumentType]
    offsets = parts[0].offsets
    if any(x.offsets is not offsets and not torch.equal(offsets, x.offsets) for x in parts[1:]):
        return None
    values = iter([part.values for part in parts])
    packed = [None if column is None else next(values) for column in columns]
    log_probs, ref_log_probs, mask, reward = packed
    if log_probs is None or ref_log_probs is None or log_probs.dim() != 1:
        return None
    if reward is not None and reward.dim() != 2:
        return None
    places = Places(offsets.diff().tolist(), None)
    return TokenColumns(log_probs, ref_log_probs, mask, reward, places)


def _of_rows(
    rows: Any, ref_rows: Any, masks: Any, rewards: Sequence[Tensor] | None
) -> TokenColumns:
    shapes = None
    if len(rows) > 0 and rows[0].dim() != 1:
        shapes = [row.shape for row in rows]
        if [row.shape for row in ref_rows] != shapes:
            raise ValueError(
                f"ref_log_probs: expected samples of the shapes {list(map(tuple, shapes))}, got "
                f"{[tuple(row.shape) for row in ref_rows]}; score the same batch with both models"
            )
    one_column = rewards is not None and len(rewards) > 0 and rewards[0].shape[1:] == (1,)
    if shapes is None and (rewards is None or one_column):
        packed = pack_samples(rows, ref_rows, masks, rewards)
        one = None if packed.reward is None else packed.reward.unsqueeze(-1)
        return TokenColumns(*packed[:3], one, Places(packed.lengths, None))
    reward = None
    if rewards is not None:
        for i, (row, own) in enumerate(zip(rows, rewards, strict=True)):
            _check_reward(f"reward: sample {i}", row, own)
        pairs = zip(rows, rewards, strict=True)
        spread = [own.expand(*row.shape, own.shape[-1]).flatten(0, -2) for row, own in pairs]
        reward = torch.cat(spread)
    flat = [None if x is None else [row.flatten() for row in x] for x in (rows, ref_rows, masks)]
    packed = pack_samples(*flat)  # pyright: ignore[reportArgumentType]
    return TokenColumns(*packed[:3], reward, Places(packed.lengths, None, shapes))


def _check_reward(name: str, log_probs: Tensor, reward: Tensor) -> None:
    fits = zip(reward.shape, log_probs.shape, strict=False)
    if reward.dim() != log_probs.dim() + 1 or any(size not in (1, n) for size, n in fits):
        raise ValueError(
            f"{name}: expected one dimension more than the log-probs, {(*log_probs.shape, 1)}, got "
            f"{tuple(reward.shape)}; add it with .unsqueeze(-1)"
        )


def _jagged_offsets(
    log_probs: Column, reward: Column | None, lengths: Sequence[int]
) -> Tensor | None:
    """The offsets ``[B + 1]`` of results that are written beside a jagged reward, else ``None``.

    torchrl gives a strided KL for jagged log-probs, and raises an error for a jagged reward. Jagged
    log-probs without holes lend theirs, because torch combines jagged tensors only if they share
    one tensor of offsets.
    """
    if not isinstance(reward, NestedTensor):
        return None
    if isinstance(log_probs, NestedTensor) and lengths_beside_holes(log_probs) is None:
        return log_probs.offsets()
    return ragged.offsets_of(lengths, reward.device)
