"""Columns of a tensordict: read as rows, dense or nested tensors, written back in kind.

torchrl delivers a batch of dialogs as a ``LazyStackedTensorDict``, one ``TensorDict`` a sample. Its
public ``get`` and ``set`` cost microseconds a sample and key, more than the arithmetic. Where every
type involved is exactly the known one and nothing is locked, :class:`SampleColumns` reads and
writes the samples' own dicts; everywhere else :class:`Columns` goes through the public interface.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torchrl.data import Composite, Unbounded
from torchrl.modules.llm.policies import LogProbs

from fusedrl import ragged
from fusedrl._host import Plain, put

Column = Tensor | Sequence[Tensor]

_PLAIN = Plain(Tensor, TensorDict, LogProbs)


def is_nested(column: Any) -> bool:
    """Whether a column is a nested tensor; a jagged one is told by its type.

    Every attribute of a jagged tensor, even ``is_nested``, costs microseconds of dispatch.
    """
    return isinstance(column, NestedTensor) or (isinstance(column, Tensor) and column.is_nested)


def is_dense(column: Any) -> TypeGuard[Tensor]:
    """Whether a column is one tensor without ragged dimensions."""
    return isinstance(column, Tensor) and not is_nested(column)


def check_some(td: TensorDictBase) -> None:
    """Refuse a batch of no sample, of which an empty stack does not even tell its keys."""
    if td.batch_size.numel() == 0:
        raise ValueError("tensordict: expected at least one sample, got none; skip empty batches")


def column_rows(column: Column) -> Sequence[Tensor]:
    """A dense, nested or stacked column as one row a sample."""
    return column.unbind(0) if isinstance(column, Tensor) else column


def jagged_offsets(
    log_probs: Column, reward: Column | None, lengths: Sequence[int]
) -> Tensor | None:
    """Offsets ``[B + 1]`` of what is written beside a jagged reward; ``None`` beside another one.

    Those of jagged log-probs where they have no holes: torch combines columns of one offsets only.
    """
    if not isinstance(reward, NestedTensor):
        return None
    if isinstance(log_probs, NestedTensor) and log_probs._lengths is None:
        return log_probs.offsets()
    return ragged.offsets_of(lengths, reward.device)


class Columns:
    """Columns of any tensordict, through its public interface."""

    def __init__(self, td: TensorDictBase) -> None:
        self.td = td

    def get(self, key: NestedKey) -> Column | None:
        """The column: a list of rows from a stack of samples, else the tensor as stored."""
        return self.td.get(key, as_list=True)  # pyright: ignore[reportCallIssue]

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store a dense or nested column, or rows as a nested one of this layout."""
        if not isinstance(value, Tensor):
            value = torch.nested.as_nested_tensor(list(value), layout=layout)
        self.td.set(key, value)

    def set_packed(
        self, key: NestedKey, values: Tensor, lengths: list[int], jagged: Tensor | None = None
    ) -> None:
        """Store packed ``values [N, ...]`` as a nested column, which a stack unbinds into rows.

        It is strided, or jagged over the offsets ``jagged``, ``[B + 1]``.
        """
        if jagged is not None:
            self.td.set(key, ragged.to_jagged(ragged.Ragged(values, jagged)))
            return
        # On the CPU: nobody reads them beside lengths, and a copy to a device would wait for it.
        offsets = ragged.offsets_of(lengths)
        self.td.set(key, ragged.to_strided(ragged.Ragged(values, offsets), lengths))


class SampleColumns:
    """Columns of samples whose dicts are reached directly."""

    def __init__(self, samples: list[TensorDict], dicts: list[dict[str, Any]]) -> None:
        self.samples, self._dicts = samples, dicts

    def entries(self, name: str) -> list[Any]:
        """What each sample holds under a plain name, ``None`` for nothing."""
        return [entries.get(name) for entries in self._dicts]

    def get(self, key: NestedKey) -> list[Tensor] | None:
        """One tensor a sample, or ``None`` where a sample has no tensor of this name."""
        rows = _PLAIN.column(self._dicts, (key,) if isinstance(key, str) else key)
        if rows is None:
            rows = [sample.get(key) for sample in self.samples]
        return rows if all(isinstance(row, Tensor) for row in rows) else None

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store one row a sample, whatever the layout."""
        rows = value.unbind(0) if isinstance(value, Tensor) else value
        if isinstance(key, str):
            put(self._dicts, key, rows)
        else:
            for sample, row in zip(self.samples, rows, strict=True):
                sample.set(key, row)

    def set_packed(
        self, key: NestedKey, values: Tensor, lengths: list[int], jagged: Tensor | None = None
    ) -> None:
        """Store views of packed ``values [N, ...]``, one a sample."""
        # Without a graph there are no views to track, which makes them a fifth cheaper.
        split = torch.split_with_sizes if values.requires_grad else torch.unsafe_split_with_sizes
        self.set(key, split(values, lengths))


def sample_columns(td: TensorDictBase) -> SampleColumns | None:
    """The samples of an unlocked stack, or stack of stacks, of plain unlocked tensordicts.

    ``None`` for anything else: a locked one, a subclass, one inside ``vmap``.
    """
    samples = _samples_of(td)
    return None if samples is None else _plain(samples)


def target_columns(td: TensorDictBase) -> SampleColumns | None:
    """As :func:`sample_columns`, for the ``"next"`` entries where the samples have them."""
    rows = sample_columns(td)
    if rows is None:
        return None
    following = rows.entries("next")
    return rows if all(td is None for td in following) else _plain(following)


def _samples_of(td: Any) -> list[Any] | None:
    """What is stacked, of whatever types."""
    if type(td) is not LazyStackedTensorDict or td.is_locked:
        return None
    if td.hook_out is not None or td.hook_in is not None:
        return None
    if td.batch_dims == 1:
        return list(td.tensordicts)
    samples: list[Any] = []
    for inner in td.tensordicts:
        rows = _samples_of(inner)
        if rows is None:
            return None
        samples += rows
    return samples


def _plain(samples: list[Any]) -> SampleColumns | None:
    dicts = _PLAIN.unlocked(samples)
    return None if dicts is None else SampleColumns(samples, dicts)


def columns_of(td: TensorDictBase) -> SampleColumns | Columns:
    """The fastest way into ``td`` that its type allows."""
    return sample_columns(td) or Columns(td)


def step_one(
    step: Callable[[TensorDictBase, TensorDictBase], Any],
    td: TensorDictBase,
    following: TensorDictBase,
) -> Any:
    """A transform's step on one sample without a batch, through stacks of one over it."""
    stack = lazy_stack([td])
    return step(stack, stack if following is td else lazy_stack([following]))[0]


def write_rows(
    td: TensorDictBase, key: NestedKey, rows: Sequence[Tensor], layout: torch.layout
) -> None:
    """Store one row a sample under ``key``.

    A stack stores it in its samples. A plain tensordict holds it as a stack of its own under a
    nested key, readable with ``get(key, as_list=True)``, and under a plain name as a nested tensor.
    """
    if isinstance(key, str):
        td.set(key, torch.nested.as_nested_tensor(list(rows), layout=layout))
    else:
        td.update(lazy_stack([TensorDict({key: row}) for row in rows]), keys_to_update=(key,))


def declare_tokens(
    spec: Composite, key: NestedKey, *trailing: int, dtype: torch.dtype = torch.float32
) -> None:
    """Declare ``key`` as one row of unknown length a sample, shaped ``[*batch, -1, *trailing]``."""
    shape = torch.Size((*spec.shape, -1, *trailing))
    spec[key] = Unbounded(shape=shape, device=spec.device, dtype=dtype)
