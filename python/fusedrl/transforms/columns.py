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
    """Keys of both log-probs and the coefficient, which examples of torchrl's give older names.

    Raises ``TypeError`` for any other argument among the ``older`` ones.
    """
    names = ("gen_log_probs_key", "ref_log_probs_key", "coef")
    for name in older.keys() - set(names):
        raise TypeError(f"{name}: expected a known argument, got an unknown one; leave it out")
    return tuple(older.get(name, value) for name, value in zip(names, values, strict=True))


def is_nested(column: Any) -> bool:
    """Whether a column is a nested tensor.

    A jagged one is recognised by its type, because every attribute of it, even ``is_nested``, takes
    microseconds of dispatch.
    """
    return isinstance(column, NestedTensor) or (isinstance(column, Tensor) and column.is_nested)


def is_dense(column: Any) -> TypeGuard[Tensor]:
    """Whether a column is one tensor without ragged dimensions."""
    return isinstance(column, Tensor) and not is_nested(column)


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
        """Store a dense column, or rows as a nested tensor of this layout."""
        if not isinstance(value, Tensor):
            value = torch.nested.as_nested_tensor(list(value), layout=layout)
        self.td.set(key, value)


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
    return Columns(_one_stack(td))


def _one_stack(td: Any) -> Any:
    """A stack of stacks as one stack of the same samples; anything else as it is."""
    parts = td.tensordicts if isinstance(td, LazyStackedTensorDict) else []
    if not all(isinstance(part, LazyStackedTensorDict) for part in parts) or not parts:
        return td
    return lazy_stack([sample for part in parts for sample in _one_stack(part).tensordicts])


def writable(transform: Transform, tensordict: TensorDictBase) -> TensorDictBase:
    """The tensordict that ``transform`` may write to: the data, or a copy that shares its tensors.

    A transform that is called by itself writes into the data. One in a ``Compose`` may be that of a
    replay buffer, and a storage of tensordicts hands out what it stores: a reward that is penalised
    in place would be penalised again each time it is sampled. So it gets a copy.
    """
    if stands_alone(transform):
        return tensordict
    return tensordict.clone(recurse=False)


def run(transform: Transform, step: Step, tensordict: TensorDictBase) -> TensorDictBase:
    """Let ``step`` write into ``"next"``, or into the root if there is no ``"next"``."""
    data = writable(transform, tensordict)
    check_all_or_none("next", list(entries_of(data, "next")), TensorDictBase)
    target = data.get("next", None)
    return step(data, data) if target is None else data.set("next", step(data, target))


def step_one(step: Step, td: TensorDictBase, following: TensorDictBase) -> Any:
    """Run a transform's step on one sample without a batch dimension, as a stack of one."""
    stack = lazy_stack([td])
    return step(stack, stack if following is td else lazy_stack([following]))[0]


def declare_tokens(
    spec: Composite, key: NestedKey, *trailing: int, dtype: torch.dtype = torch.float32
) -> None:
    """Declare ``key`` as a row of unknown length for each sample: ``[*batch, -1, *trailing]``."""
    shape = torch.Size((*spec.shape, -1, *trailing))
    spec[key] = Unbounded(shape=shape, device=spec.device, dtype=dtype)


def begin(
    tensordict: TensorDictBase, reset: TensorDictBase, key: NestedKey, *trailing: int
) -> TensorDictBase:
    """Give each dialog that begins an empty row under ``key``, a declared observation of a turn.

    torchrl carries the observations of a turn to the root of the next one. If a reset had none,
    the first turns of a batch would lack a key that the others have, and turns could not be
    concatenated. A reset of some dialogs only leaves their rows to torchrl, which fills in zeros.
    """
    mask = tensordict.get("_reset", None)
    if (mask is None or bool(mask.all())) and key not in reset.keys(True):
        reset.set(key, torch.zeros(*reset.batch_size, 0, *trailing, device=reset.device))
    return reset
