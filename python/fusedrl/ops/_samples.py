"""Lists with one tensor for each sample, which are checked against each other and packed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl.compat.torch import in_forward_mode
from fusedrl.ops._dispatch import ONE_A_TOKEN, check_device, check_tensor

COLUMNS = (torch.Size(()), torch.Size((1,)))  # trailing dimensions of one value a row
ONE_A_SAMPLE = "give one tensor for each sample"
_FAST_CAT = 32767


class PackedColumns(NamedTuple):
    """Packed columns ``[N]`` of a list of samples, and the lengths of the samples on the host."""

    columns: list[Tensor]
    lengths: list[int]


def pack_columns(
    log_probs: Sequence[Tensor], companions: Mapping[str, Sequence[Tensor]]
) -> PackedColumns:
    """Pack 1-D log-probs, and lists whose samples have the same shapes; their names are for errors.

    Raises ``ValueError``, which names the first sample whose shapes disagree, and ``TypeError`` for
    a sample that is no tensor.
    """
    if len(log_probs) == 0:
        raise ValueError(
            "log_probs: expected at least one sample, got an empty list; give all lists one tensor "
            "for each sample"
        )
    # With hundreds of short samples the loops over them take the time: there are few, and in C.
    lengths = sizes_of("log_probs", log_probs)
    packed = concatenated("log_probs", log_probs, lengths)
    if packed.dim() != 1:
        raise ValueError(
            f"log_probs: expected 1-D samples, got {tuple(log_probs[0].shape)}; "
            "flatten each with .flatten()"
        )
    columns = [_packed_like(log_probs, lengths, *column) for column in companions.items()]
    return PackedColumns([packed, *columns], lengths)


def sizes_of(name: str, column: Sequence[Tensor]) -> list[int]:
    """The number of elements of each sample."""
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
        raise ValueError(
            f"{name}: expected {len(lengths)} samples, got {len(column)}; {ONE_A_SAMPLE}"
        )
    if sizes_of(name, column) == lengths:
        packed = concatenated(name, column, lengths)
        if packed.dim() == 1:
            return packed
    i, x, y = next(
        (i, x, y)
        for i, (x, y) in enumerate(zip(log_probs, column, strict=True))
        if x.shape != y.shape
    )
    raise ValueError(
        f"{name}: sample {i}: expected shape {tuple(x.shape)} as in log_probs, got "
        f"{tuple(y.shape)}; {ONE_A_TOKEN}"
    )


def concatenated(name: str, column: Sequence[Tensor], lengths: list[int]) -> Tensor:
    """The samples of a column, one after the other in one tensor."""
    try:
        if _cat_is_slow(column, lengths):
            return _cat_in_pieces(column, lengths)
        return torch.cat(tuple(column))
    except RuntimeError as error:
        _explain(name, column)
        raise ValueError(
            f"{name}: expected samples that torch.cat takes, got some of which it says: {error}; "
            "give all the same dtype and layout"
        ) from error


def _explain(name: str, column: Sequence[Tensor]) -> None:
    """Raise an error about the first sample that cannot be concatenated with sample 0."""
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
                f"sample 0, got shape {tuple(sample.shape)}; {ONE_A_TOKEN}"
            )


def _cat_is_slow(column: Sequence[Tensor], lengths: list[int]) -> bool:
    """Whether torch.cat would copy the samples one by one, and concatenating in pieces helps.

    With several threads on the CPU it does so for results of at least 32768 elements, and each copy
    takes microseconds.
    """
    return (
        not torch.compiler.is_compiling()
        and column[0].device.type == "cpu"
        and torch.get_num_threads() > 1
        and sum(lengths) > _FAST_CAT > max(lengths)
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in column))
        and not in_forward_mode()
        and len({(x.dtype, x.shape[1:]) for x in column}) == 1
        and column[0].shape[1:] in COLUMNS
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
