"""Nested arguments of ops: packed for the op, whose results become nested tensors again."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _dispatch
from fusedrl.ragged import Packed

Column = TypeVar("Column", Tensor, "Tensor | None")


class Batch(NamedTuple):
    """The first argument of an op, packed if it was nested; it fixes the form of the others.

    Args:
        name: the name of the argument.
        values: the rows, dense.
        offsets: where the sequences of packed rows start and end.
        model: the nested tensor whose layout the results get; ``None`` for dense rows.
    """

    name: str
    values: Tensor
    offsets: Tensor | None
    model: Tensor | None

    def companion(self, name: str, value: Any) -> Any:
        """The packed values of another nested argument; with dense rows, the argument itself."""
        if self.model is None or self.offsets is None:
            return value
        _dispatch.check_tensor(name, value, _dispatch.NESTED, like=f" like {self.name}")
        values, offsets = ragged.from_nested(value, name)
        if offsets is self.offsets:
            return values
        _dispatch.check_device(name, offsets, self.offsets.device)
        if not offsets.is_meta and not torch.equal(offsets, self.offsets):
            expected, got = (x.diff()[:8].tolist() for x in (self.offsets, offsets))
            raise ValueError(
                f"{name}: expected the sequence lengths of {self.name}, {expected}, got {got}; "
                "nest both with the same lengths"
            )
        return values

    def optional(self, name: str, value: Any) -> Any:
        """:meth:`companion` for an argument that may be ``None``."""
        return None if value is None else self.companion(name, value)

    def result(self, flat: Column) -> Column:
        """A result with one value per token, in the form of the arguments."""
        if flat is None or self.model is None or self.offsets is None:
            return flat
        nested: Any
        if self.model.layout == torch.jagged:
            nested = ragged.to_jagged(Packed(flat, ragged.jagged_parts(self.model)[1]))
        else:
            nested = ragged.to_strided(Packed(flat, self.offsets))
        return nested


def pack(
    name: str,
    values: Tensor,
    offsets: Tensor | None,
    like: Tensor | None = None,
    form: str = "[B, j, columns]",
) -> Batch:
    """The batch of an op, whose first argument may be nested with the dimensions of ``form``.

    Results share the offsets of ``like`` (by default the first argument), so that they can be
    combined with it.
    """
    _dispatch.check_tensor(name, values, _dispatch.DENSE, _dispatch.NESTED)
    if not values.is_nested:
        return Batch(name, values, offsets, None)
    if offsets is not None:
        raise ValueError(
            f"offsets: expected None with nested {name}, which has offsets, got "
            f"{_dispatch.kind(offsets)}; leave it out"
        )
    packed = ragged.from_nested(values, name)
    if values.dim() != form.count(",") + 1:
        raise ValueError(
            f"{name}: expected a nested {form}, got one of {values.dim()} dimensions; "
            f"nest a tensor {form.replace('B, j', 'T')} for each sequence"
        )
    return Batch(name, packed.values, packed.offsets, values if like is None else like)
