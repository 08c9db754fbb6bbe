"""Environments and policies that write into the same tensors at every turn."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, is_tensor_collection

logger = logging.getLogger("fusedrl")

TRIAL = 3  # turns: also finds two buffers that take turns

Key = tuple[str, ...]


class Reuse:
    """Keeps turns as they were: what is written again at a later turn is copied, nothing else.

    The first turns are copied, and tell which entries are at the address that they had before.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []  # of a turn
        self._trial: dict[int, list[TensorDictBase] | None] = {}  # by row: turns as they came

    def turn(self, turn: TensorDictBase, row: int = 0) -> TensorDictBase:
        """The turn, or what takes its place.

        Args:
            turn: of all dialogs, or of one.
            row: which one.

        Raises:
            RuntimeError: it is the tensordict of a turn before.
        """
        seen = self._trial.setdefault(row, [])
        if seen is None:
            _copy(turn, self.keys)
            return turn
        if any(turn is other for other in seen):
            raise RuntimeError(
                "policy: expected a tensordict of its own for each turn, got that of a turn "
                "before; write into the one that the policy is given, or return a new one"
            )
        seen.append(turn)
        if len(seen) == TRIAL:
            self._compare(seen)
            self._trial[row] = None
        return turn.clone()

    def carried(self, carried: TensorDictBase) -> TensorDictBase:
        """What the policy is called with next, or what takes its place; after :meth:`turn`."""
        if any(seen is not None for seen in self._trial.values()):
            return carried.clone()
        _copy(carried, [key[1:] for key in self.keys if key[0] == "next"])
        return carried

    def _compare(self, turns: list[TensorDictBase]) -> None:
        addresses = [dict(_addresses(turn)) for turn in turns]
        again = {
            tuple(part for part in path if isinstance(part, str))
            for n, later in enumerate(addresses)
            for path, address in later.items()
            if any(earlier.get(path) == address for earlier in addresses[:n])
        }
        new = sorted(again - set(self.keys))
        if new and not self.keys:
            logger.warning(
                "LLMCollector: policy and environment return the same tensors at each turn under "
                "%s, which are copied; return new ones to save that (this is said once)",
                new,
            )
        self.keys += new


def _addresses(td: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[Any, int]]:
    """Path and address of each tensor; numbers in a path are those of rows."""
    if isinstance(td, LazyStackedTensorDict):
        for n, row in enumerate(td.tensordicts):
            yield from _addresses(row, (*path, n))
        return
    for key, value in td.items():
        if isinstance(value, torch.Tensor):
            if value.numel() and not value.is_nested:
                yield (*path, key), value.data_ptr()
        elif is_tensor_collection(value):
            yield from _addresses(value, (*path, key))


def _copy(td: Any, keys: list[Key]) -> None:
    for part in td.tensordicts if keys and isinstance(td, LazyStackedTensorDict) else [td]:
        for key in keys:
            value = part.get(key, None)
            if value is not None:
                part.set(key, value.clone())
