"""Nested arguments of ops over packed rows: one wrapper packs them and rewraps the answer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fusedrl import ragged
from fusedrl.ops import _dispatch
from fusedrl.ragged import Ragged

P = ParamSpec("P")
R = TypeVar("R")


def accepts_nested(
    *companions: str,
    optional: Sequence[str] = ("mask",),
    per_sequence: str | None = None,
    over: str | None = None,
    form: str = "[B, j, columns]",
    fields: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let an op over packed values take a nested first argument; other calls go to the op itself.

    The op runs once, on packed values with their ``offsets``. Its answer, or ``fields`` of an
    answer that is a named tuple, becomes nested over the offsets of the argument ``over``, or of
    the first one, so that it composes with that tensor.

    Args:
        companions: arguments that are nested beside the first one, with its sequence lengths.
        optional: companions that may be ``None``.
        per_sequence: an argument that may be nested as well, or dense with one value a sequence,
            which is spread over its tokens. The op gets ``[1, N]``.
        over: the argument whose offsets the answer has.
        form: the dimensions of the first argument.
        fields: what of a named tuple has one value a token.
    """

    def wrap(op: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(op)
        name = next(iter(signature.parameters))

        @functools.wraps(op)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            nested: Any = args[0] if args else kwargs.get(name)
            if not isinstance(nested, Tensor) or not nested.is_nested:
                return op(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:
                return op(*args, **kwargs)  # which raises the error that names it
            packed = _pack(name, nested, given.get("offsets"), form)
            model = nested if over is None else given[over]
            values: dict[str, Any] = {name: packed.values, "offsets": packed.offsets}
            for key in (*companions, *(x for x in optional if given.get(x) is not None)):
                values[key] = _companion(key, given[key], name, packed.offsets)
            if per_sequence is not None and given.get(per_sequence) is not None:
                values[per_sequence] = _spread(per_sequence, given[per_sequence], name, packed)
            result: Any = op(**(given | values))  # pyright: ignore[reportCallIssue]
            if isinstance(result, Tensor):
                return _rewrapped(result, model, packed.offsets)  # pyright: ignore[reportReturnType]
            if not isinstance(result, tuple):
                return result
            columns: Any = {field: getattr(result, field, None) for field in fields}
            nested_columns = {
                field: _rewrapped(column, model, packed.offsets)
                for field, column in columns.items()
                if column is not None
            }
            return result._replace(**nested_columns)  # pyright: ignore[reportAttributeAccessIssue]

        return wrapped

    return wrap


def _pack(name: str, nested: Tensor, offsets: Tensor | None, form: str) -> Ragged:
    if offsets is not None:
        raise ValueError(
            f"offsets: expected None with nested {name}, which has its own, got "
            f"{_dispatch.kind(offsets)}; leave it out"
        )
    packed = ragged.from_nested(nested, name)
    if nested.dim() != form.count(",") + 1:
        raise ValueError(
            f"{name}: expected a nested {form}, got one of {nested.dim()} dimensions; "
            f"nest a tensor {form.replace('B, j', 'T')} for each sequence"
        )
    return packed


def _companion(name: str, value: Any, like: str, offsets: Tensor) -> Tensor:
    """The packed values of a nested companion of ``like``, which has these ``offsets``."""
    _dispatch.check_tensor(name, value, _dispatch.NESTED, like=f" like {like}")
    values, own = ragged.from_nested(value, name)
    if own is offsets:
        return values
    _dispatch.check_device(name, own, offsets.device)
    if own.is_meta:
        return values
    if not torch.equal(own, offsets):
        expected, got = (x.diff()[:8].tolist() for x in (offsets, own))
        raise ValueError(
            f"{name}: expected the sequence lengths of {like}, {expected}, got {got}; "
            "nest both with the same lengths"
        )
    return values


def _spread(name: str, value: Any, like: str, packed: Ragged) -> Tensor:
    """Values for each token, ``[1, N]``: nested ones, or dense ones of sequences repeated."""
    _dispatch.check_tensor(name, value, _dispatch.DENSE, _dispatch.NESTED)
    if value.is_nested:
        return _companion(name, value, like, packed.offsets)[None]
    count = len(packed.offsets) - 1
    if value.shape not in ((count,), (count, 1)):
        raise ValueError(
            f"{name}: expected shape ({count},), one for each sequence of nested {like}, got "
            f"{tuple(value.shape)}; nest what has one value for each token like {like}"
        )
    _dispatch.check_device(name, value, packed.values.device)
    tokens = len(packed.values)
    return torch.repeat_interleave(value.flatten(), packed.offsets.diff(), output_size=tokens)[None]


def _rewrapped(flat: Tensor, model: Tensor, offsets: Tensor) -> Tensor:
    """Packed values, one for each token, as a nested tensor in the layout of ``model``."""
    if model.layout == torch.jagged:
        return ragged.to_jagged(Ragged(flat, ragged.jagged_parts(model)[1]))
    return ragged.to_strided(Ragged(flat, offsets))
