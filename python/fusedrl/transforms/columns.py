"""Read columns of a tensordict as rows or tensors, and write results in the same layout.

torchrl delivers a batch of dialogs as a ``LazyStackedTensorDict`` with one ``TensorDict`` for each
sample. Its public ``get`` and ``set`` cost microseconds for each sample and key, more than the
arithmetic. If all types are known and nothing is locked, :class:`SampleColumns` accesses the dicts
of the samples directly. :class:`Columns` uses the public interface for all other data.
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
from torchrl.envs import Transform
from torchrl.modules.llm.policies import LogProbs

from fusedrl._host import Plain, entries, put
from fusedrl.compat import tensordict as compat
from fusedrl.compat.torch import NestedTensor
from fusedrl.compat.torchrl import stands_alone

Column = Tensor | Sequence[Tensor]
Step = Callable[[TensorDictBase, TensorDictBase], TensorDictBase]

_PLAIN = Plain(Tensor, TensorDict, LogProbs)


def renamed(older: dict[str, Any], *values: Any) -> tuple[Any, ...]:
    """Keys of both log-probs and the coefficient, also under the names in torchrl's examples.

    Raises ``TypeError`` for any other name in ``older``.
    """
    names = ("gen_log_probs_key", "ref_log_probs_key", "coef")
    for name in older.keys() - set(names):
        raise TypeError(f"{name}: expected a known argument, got an unknown one; leave it out")
    return tuple(older.get(name, value) for name, value in zip(names, values, strict=True))


def is_nested(column: Any) -> bool:
    """Whether a column is a nested tensor.

    Jagged ones are recognised by type, since reading any attribute costs microseconds of dispatch.
    """
    return isinstance(column, NestedTensor) or (isinstance(column, Tensor) and column.is_nested)


def is_dense(column: Any) -> TypeGuard[Tensor]:
    """Whether a column is one tensor without ragged dimensions."""
    return isinstance(column, Tensor) and not is_nested(column)


def check_all_or_none(key: NestedKey, found: Sequence[Any], kind: type = Tensor) -> None:
    """Raise if only some samples have an entry, or have it with the right type.

    ``get`` of a lazy stack hides such an entry.
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
    """The entry of each sample under ``key``, or ``None``."""
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
    """Columns of any tensordict, through its public interface."""

    def __init__(self, td: TensorDictBase) -> None:
        self.td = td

    def get(self, key: NestedKey) -> Column | None:
        """The column: a list of rows for a stack of samples, otherwise the stored tensor.

        ``None`` if no sample has it; ``ValueError`` if only some do.
        """
        column = self.td.get(key, as_list=True)  # pyright: ignore[reportCallIssue]
        if column is None:
            check_all_or_none(key, list(entries_of(self.td, key)))
        return column

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store a dense column, or rows as a nested tensor with this layout."""
        if not isinstance(value, Tensor):
            value = torch.nested.as_nested_tensor(list(value), layout=layout)
        self.td.set(key, value)


class SampleColumns:
    """Columns of a stack of samples, through the dicts of the samples."""

    def __init__(self, samples: list[TensorDict], dicts: list[dict[str, Any]]) -> None:
        self.samples, self._dicts = samples, dicts

    def entries(self, name: str) -> list[Any] | None:
        """The entries of the samples under a string key; ``None`` if no sample has it."""
        return entries(self._dicts, name)

    def get(self, key: NestedKey) -> list[Tensor] | None:
        """One tensor for each sample, ``None`` if no sample has it; ``ValueError`` if some do."""
        rows = _PLAIN.column(self._dicts, (key,) if isinstance(key, str) else key)
        if rows is not None:
            return rows
        rows = [sample.get(key) for sample in self.samples]
        check_all_or_none(key, rows)
        return None if rows[0] is None else rows

    def set(self, key: NestedKey, value: Column, layout: torch.layout = torch.strided) -> None:
        """Store one row in each sample; the layout is ignored."""
        rows = value.unbind(0) if isinstance(value, Tensor) else value
        if isinstance(key, str):
            put(self._dicts, key, rows)
        else:
            for sample, row in zip(self.samples, rows, strict=True):
                sample.set(key, row)


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
    """The columns of ``td``, by the fastest access that its type allows."""
    if isinstance(td, LazyStackedTensorDict) and td.stack_dim != 0:
        raise ValueError(
            f"tensordict: expected samples that are stacked in dimension 0, got a stack in "
            f"dimension {td.stack_dim}; stack them with lazy_stack(samples, 0)"
        )
    samples = sample_columns(td)
    if samples is not None:
        return samples
    return Columns(_one_stack(td))


def _one_stack(td: Any) -> Any:
    """Flatten a stack of stacks; returns other tensordicts unchanged."""
    parts = td.tensordicts if isinstance(td, LazyStackedTensorDict) else []
    if not all(isinstance(part, LazyStackedTensorDict) for part in parts) or not parts:
        return td
    return lazy_stack([sample for part in parts for sample in _one_stack(part).tensordicts])


def writable(transform: Transform, tensordict: TensorDictBase) -> TensorDictBase:
    """The tensordict that ``transform`` may write to: the data, or a shallow copy.

    A standalone transform writes into the data. One in a ``Compose`` may belong to a replay buffer,
    whose storage may return stored tensordicts: a reward penalised in place would be penalised
    again each time it is sampled. So it gets a copy.
    """
    if stands_alone(transform):
        return tensordict
    return tensordict.clone(recurse=False)


def run(transform: Transform, step: Step, tensordict: TensorDictBase) -> TensorDictBase:
    """Apply ``step``, which writes to ``"next"``, or to the root if there is no ``"next"``."""
    data = writable(transform, tensordict)
    check_all_or_none("next", list(entries_of(data, "next")), TensorDictBase)
    target = data.get("next", None)
    return step(data, data) if target is None else data.set("next", step(data, target))


def step_one(step: Step, td: TensorDictBase, following: TensorDictBase) -> Any:
    """Apply ``step`` to a sample without batch dimension, as a stack of one."""
    stack = lazy_stack([td])
    return step(stack, stack if following is td else lazy_stack([following]))[0]


def declare_tokens(
    spec: Composite, key: NestedKey, *trailing: int, dtype: torch.dtype = torch.float32
) -> None:
    """Declare ``key`` as a row of variable length for each sample: ``[*batch, -1, *trailing]``."""
    shape = torch.Size((*spec.shape, -1, *trailing))
    spec[key] = Unbounded(shape=shape, device=spec.device, dtype=dtype)


def begin(
    tensordict: TensorDictBase, reset: TensorDictBase, key: NestedKey, *trailing: int
) -> TensorDictBase:
    """Write an empty row under the declared observation ``key`` at the reset of each dialog.

    torchrl copies the observations of a turn to the root of the next one. Without the key in the
    reset, the first turns would lack it, and turns could not be concatenated. In a partial reset
    torchrl fills the rows with zeros.
    """
    mask = tensordict.get("_reset", None)
    if (mask is None or bool(mask.all())) and key not in reset.keys(True):
        reset.set(key, torch.zeros(*reset.batch_size, 0, *trailing, device=reset.device))
    return reset
