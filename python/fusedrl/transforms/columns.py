"""Read columns of a tensordict as rows or tensors, and write results in the form of the data.

torchrl delivers a batch of dialogs as a ``LazyStackedTensorDict`` of one ``TensorDict`` for each
sample. Its public ``get`` and ``set`` take microseconds for each sample and key, which is more than
the arithmetic takes. If all types are exactly the known ones and nothing is locked,
:class:`SampleColumns` reads and writes the samples' own dicts. :class:`Columns` uses the public
interface, for all other data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from tensordict import (
    LazyStackedTensorDict,
    NestedKey,
    TensorDict,
    TensorDictBase,
    is_tensorclass,
    lazy_stack,
)
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.modules.llm.policies import LogProbs

from fusedrl import ragged
from fusedrl._host import Plain, entries, put
from fusedrl.compat import tensordict as compat
from fusedrl.compat.torch import NestedTensor

Column = Tensor | Sequence[Tensor]

_PLAIN = Plain(Tensor, TensorDict, LogProbs)


def is_nested(column: Any) -> bool:
    """Whether a column is a nested tensor.

    A jagged one is recognised by its type, because every attribute of it, even ``is_nested``, takes
    microseconds of dispatch.
    """
    return isinstance(column, NestedTensor) or (isinstance(column, Tensor) and column.is_nested)


def is_dense(column: Any) -> TypeGuard[Tensor]:
    """Whether a column is one tensor without ragged dimensions."""
    return isinstance(column, Tensor) and not is_nested(column)


def check_some(td: TensorDictBase) -> None:
    """Refuse a batch without samples: an empty stack does not even have keys."""
    if td.batch_size.numel() == 0:
        raise ValueError("tensordict: expected at least one sample, got none; skip empty batches")


def check_all_or_none(key: NestedKey, found: Sequence[Any], kind: type = Tensor) -> None:
    """Refuse an entry that some samples have and others lack, or have as something else.

    A stack hides such an entry, as if no sample had it.
    """
    if all(value is None for value in found):
        return
    for i, value in enumerate(found):
        if not isinstance(value, kind):
            got = "none" if value is None else f"a {type(value).__name__}"
            raise ValueError(
                f"tensordict: expected a {kind.__name__} under {key!r} in every sample, or in "
                f"none, got {got} in sample {i}; give every sample one, or delete this entry"
            )


def entries_of(td: Any, key: NestedKey) -> Iterator[Any]:
    """What each sample of any tensordict has under ``key``, or ``None`` for it."""
    if is_tensorclass(td):
        td = compat.tensordict_of(td)
    if isinstance(td, LazyStackedTensorDict):
        for inner in td.tensordicts:
            yield from entries_of(inner, key)
        return
    first, *rest = (key,) if isinstance(key, str) else key
    value = td.get(first, None) if isinstance(td, TensorDictBase) else None
    if rest and value is not None:
        yield from entries_of(value, tuple(rest))
    else:
        yield value


def column_rows(column: Column) -> Sequence[Tensor]:
    """The rows of a dense, nested or stacked column, one for each sample."""
    return column.unbind(0) if isinstance(column, Tensor) else column


class Columns:
    """Columns of any tensordict, read and written through its public interface."""

    def __init__(self, td: TensorDictBase) -> None:
        self.td = td

    def get(self, key: NestedKey) -> Column | None:
        """The column: a list of rows for a stack of samples, else the tensor as it is stored.

        ``None`` if no sample has it; an error if some have it.
        """
        column = self.td.get(key, as_list=True)  # pyright: ignore[reportCallIssue]
        if column is None:
            check_all_or_none(key, list(entries_of(self.td, key)))
        return column

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store a dense or nested column, or rows as a nested tensor of this layout."""
        if not isinstance(value, Tensor):
            value = torch.nested.as_nested_tensor(list(value), layout=layout)
        self.td.set(key, value)

    def set_packed(
        self, key: NestedKey, values: Tensor, lengths: list[int], jagged: Tensor | None = None
    ) -> None:
        """Store packed ``values [N, ...]`` as a nested column, which a stack unbinds into rows.

        The column is jagged with the offsets ``jagged``, ``[B + 1]``, if they are given, and
        strided otherwise.
        """
        if jagged is not None:
            self.td.set(key, ragged.to_jagged(ragged.Ragged(values, jagged)))
            return
        # They stay on the CPU: nothing reads them beside lengths, and a copy waits for the device.
        offsets = ragged.offsets_of(lengths)
        self.td.set(key, ragged.to_strided(ragged.Ragged(values, offsets), lengths))


class SampleColumns:
    """Columns of samples, read from and written into the samples' own dicts."""

    def __init__(self, samples: list[TensorDict], dicts: list[dict[str, Any]]) -> None:
        self.samples, self._dicts = samples, dicts

    def entries(self, name: str) -> list[Any] | None:
        """What each sample has under a plain name, or ``None``; ``None`` if no sample has it."""
        return entries(self._dicts, name)

    def get(self, key: NestedKey) -> list[Tensor] | None:
        """One tensor for each sample, or ``None`` if no sample has it; an error if some have it."""
        rows = _PLAIN.column(self._dicts, (key,) if isinstance(key, str) else key)
        if rows is not None:
            return rows
        rows = [sample.get(key) for sample in self.samples]
        check_all_or_none(key, rows)
        return None if rows[0] is None else rows

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store one row in each sample; the layout has no effect."""
        rows = value.unbind(0) if isinstance(value, Tensor) else value
        if isinstance(key, str):
            put(self._dicts, key, rows)
        else:
            for sample, row in zip(self.samples, rows, strict=True):
                sample.set(key, row)

    def set_packed(
        self, key: NestedKey, values: Tensor, lengths: list[int], jagged: Tensor | None = None
    ) -> None:
        """Store a view of packed ``values [N, ...]`` in each sample."""
        # Without a gradient graph nothing has to track the views, which makes them a fifth cheaper.
        split = torch.split_with_sizes if values.requires_grad else torch.unsafe_split_with_sizes
        self.set(key, split(values, lengths))


def sample_columns(td: TensorDictBase) -> SampleColumns | None:
    """The samples of an unlocked stack, or stack of stacks, of plain unlocked tensordicts.

    ``None`` for anything else, such as an empty or a locked stack, a subclass, or a tensordict
    inside ``vmap``.
    """
    samples = _samples_of(td)
    return _plain(samples) if samples else None


def target_columns(td: TensorDictBase) -> SampleColumns | None:
    """As :func:`sample_columns`, but of the ``"next"`` entries if the samples have them."""
    rows = sample_columns(td)
    if rows is None:
        return None
    following = rows.entries("next")
    return rows if following is None else _plain(following)


def _samples_of(td: Any) -> list[Any] | None:
    """The elements of a stack, of any types; ``None`` for what is no plain, unlocked stack."""
    if type(td) is not LazyStackedTensorDict or td.is_locked or td.stack_dim != 0:
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
    """The columns of ``td``, in the fastest way that its type allows."""
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim != 0:
        raise ValueError(
            f"tensordict: expected samples that are stacked in dimension 0, got a stack in "
            f"dimension {td.stack_dim}; stack them with lazy_stack(samples, 0)"
        )
    samples = sample_columns(td)
    if samples is not None:
        return samples
    check_some(td)
    return Columns(_one_stack(td))


def _one_stack(td: Any) -> Any:
    """A stack of stacks as one stack of the same samples; anything else as it is."""
    parts = td.tensordicts if isinstance(td, LazyStackedTensorDict) else []
    if not all(isinstance(part, LazyStackedTensorDict) for part in parts) or not parts:
        return td
    return lazy_stack([sample for part in parts for sample in _one_stack(part).tensordicts])


def step_one(
    step: Callable[[TensorDictBase, TensorDictBase], Any],
    td: TensorDictBase,
    following: TensorDictBase,
) -> Any:
    """Run a transform's step on one sample without a batch dimension, as a stack of one."""
    stack = lazy_stack([td])
    return step(stack, stack if following is td else lazy_stack([following]))[0]


def write_rows(
    td: TensorDictBase, key: NestedKey, rows: Sequence[Tensor], layout: torch.layout
) -> None:
    """Store one row for each sample under ``key``.

    A stack stores each row in its sample. A plain tensordict stores a nested tensor under a plain
    name. Under a nested key it stores a stack, which ``get(key, as_list=True)`` reads.
    """
    if isinstance(key, str):
        td.set(key, torch.nested.as_nested_tensor(list(rows), layout=layout))
    else:
        td.update(lazy_stack([TensorDict({key: row}) for row in rows]), keys_to_update=(key,))


def declare_tokens(
    spec: Composite, key: NestedKey, *trailing: int, dtype: torch.dtype = torch.float32
) -> None:
    """Declare ``key`` as a row of unknown length for each sample: ``[*batch, -1, *trailing]``."""
    shape = torch.Size((*spec.shape, -1, *trailing))
    spec[key] = Unbounded(shape=shape, device=spec.device, dtype=dtype)
