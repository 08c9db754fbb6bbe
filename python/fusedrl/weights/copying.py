"""Weights of any form into tensors that exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

Weights = Any  # a tensordict, or what the hooks of a subclass understand


def unwrap(weights: Weights) -> Weights:
    """The weights of a module without their autograd graph; anything else as it is."""
    # TensorDictParams are both.
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        weights = TensorDict.from_module(weights)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]
    return weights


def match_weights(source: Weights, target: TensorDictBase) -> list[tuple[Tensor, Tensor]]:
    """Pairs of an entry of ``target`` and the new value that ``source`` has for it.

    ``source`` is a tensordict, a module or a mapping (a state dict's dotted names are nested); it
    may lack entries.

    Raises:
        TypeError: a source of another type.
        ValueError: an entry that ``target`` does not have, or has in another shape.
    """
    source = unwrap(source)
    if isinstance(source, Mapping) and not isinstance(source, TensorDictBase):
        source = TensorDict(dict(source)).unflatten_keys(".")
    if not isinstance(source, TensorDictBase):
        raise TypeError(
            "weights: expected a tensordict, a module or a dict of tensors, got "
            f"{type(source).__name__}; take them with TensorDict.from_module(policy)"
        )
    pairs = []
    for key, value in source.items(include_nested=True, leaves_only=True):
        entry = target.get(key, None)
        if not isinstance(entry, Tensor) or entry.shape != value.shape:
            there = tuple(entry.shape) if isinstance(entry, Tensor) else "no such entry"
            raise ValueError(
                f"weights: {key!r}: expected the policy's names and shapes, got "
                f"{tuple(value.shape)} for {there}; rename or reshape in _maybe_map_weights"
            )
        pairs.append((entry, value))
    return pairs


@torch.no_grad()
def copy_weights(source: Weights, target: TensorDictBase) -> None:
    """Write ``source`` into ``target`` in place, leaves that require grad included.

    Entries that ``source`` lacks stay as they are. Errors are those of :func:`match_weights`, and
    come before anything is written.
    """
    for entry, value in match_weights(source, target):
        entry.copy_(value)
