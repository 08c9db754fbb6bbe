"""Copies of turns, which policy and environment write into no more."""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorStack,
    TensorDict,
    is_tensorclass,
)
from torch import Tensor

SMALL = 256  # bytes; rows whose copies share memory keep no more than that of each other
_UNCHANGING = {str, int, float, bool, bytes, type(None)}


class Copies:
    """Copies of a turn before and after an environment has stepped with it.

    A tensor that was copied before is not copied again: what is written into it in the meantime is
    in no copy. Those under ``"next"`` are copied after the step only, as an environment may return
    what it was given.
    """

    def __init__(self) -> None:
        # Originals with their copies; they are kept, as ids are used again.
        self._before: defaultdict[int, deque[tuple[Tensor, Tensor]]] = defaultdict(deque)
        self._remembers = False

    def before(self, value: Any) -> None:
        """Copy what an environment is given."""
        self._remembers = True
        self._of(value)
        self._remembers = False

    def after(self, value: Any) -> Any:
        """A copy of a tensordict, with memory of its own for every tensor in it."""
        return self._of(value)

    def _of(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorDict:
            return self._rows([value])[0]
        if (kind is LazyStackedTensorDict or kind is NonTensorStack) and value.tensordicts:
            return kind._new_lazy_unsafe(
                *self._column(value.tensordicts),
                stack_dim=value.stack_dim,
                stack_dim_name=value._td_dim_name,
                hook_in=value.hook_in,
                hook_out=value.hook_out,
            )
        if is_tensorclass(value):
            return self._of_tensorclass(value)
        return value.clone()

    def _column(self, values: list[Any]) -> list[Any]:
        """Copies of what several rows have under one key."""
        kinds = set(map(type, values))
        if kinds == {TensorDict}:
            return self._rows(values)
        if kinds != {Tensor}:
            copy_of = self._of_tensorclass if all(map(is_tensorclass, kinds)) else self._of_one
            return [copy_of(value) for value in values]
        first: Tensor = values[0]
        if len(values) == 1 or first.numel() * first.element_size() > SMALL:
            return [self._clone(value) for value in values]
        if not self._remembers and any(id(value) in self._before for value in values):
            return [self._clone(value) for value in values]
        like = (first.dtype, first.shape, first.device)
        if any((v.dtype, v.shape, v.device) != like or v.is_nested for v in values):
            return [self._clone(value) for value in values]
        copies = list(torch.stack(values).unbind(0))  # a third of the time of as many clones
        if self._remembers:
            for value, made in zip(values, copies, strict=True):
                self._before[id(value)].append((value, made))
        return copies

    def _of_one(self, value: Any) -> Any:
        return self._clone(value) if isinstance(value, Tensor) else self._of(value)

    def _clone(self, value: Tensor) -> Tensor:
        if not self._remembers and (made := self._before.get(id(value))):
            return made.popleft()[1]
        made = value.clone()
        if self._remembers:
            self._before[id(value)].append((value, made))
        return made

    def _rows(self, rows: list[TensorDict]) -> list[TensorDict]:
        """Copies of tensordicts, key by key where all have the same keys."""
        entries = [row._tensordict for row in rows]
        keys = entries[0].keys()
        if any(other.keys() != keys for other in entries[1:]):
            return [copy for row in rows for copy in self._rows([row])]
        columns = []
        for key in keys:
            values = [entry[key] for entry in entries]
            if key != "next":
                columns.append(self._column(values))
            elif self._remembers:  # a turn of before, which is going to be replaced
                columns.append(values)
            else:
                columns.append(Copies()._column(values))
        return [
            TensorDict._new_unsafe(
                dict(zip(keys, values, strict=True)),
                batch_size=row.batch_size,
                device=row.device,
                names=row._maybe_names(),
            )
            for row, *values in zip(rows, *columns, strict=True)
        ]

    def _of_tensorclass(self, value: Any) -> Any:
        # Twenty times faster than its clone(), which looks at each of its fields.
        made = object.__new__(type(value))
        state = made.__dict__
        state.update(value.__dict__)
        tensors = state["_tensordict"]
        if type(tensors) is TensorDict and not tensors._tensordict:  # a text, say
            size, device = tensors.batch_size, tensors.device
            state["_tensordict"] = TensorDict._new_unsafe({}, batch_size=size, device=device)
        else:
            state["_tensordict"] = self._of(tensors)
        fields = state["_non_tensordict"] = dict(state["_non_tensordict"])
        for name, field in fields.items():
            if type(field) not in _UNCHANGING:
                fields[name] = copy.deepcopy(field)
        return made
