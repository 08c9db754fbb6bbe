"""Copies weights of any form into existing tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from fusedrl.channel.name_prefixes import match_prefixes
from fusedrl.channel.sources import Place, places_of
from fusedrl.channel.tensors import identity, same_values

Weights = Any  # a tensordict, or what the hooks of a subclass understand


def unwrap(weights: Weights) -> Weights:
    """The weights of a module without their autograd graph; anything else as it is."""
    # TensorDictParams are both.
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        weights = TensorDict.from_module(weights)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]
    return weights


def named_as(target: TensorDictBase, source: Weights) -> Weights:
    """``source`` under the names of ``target``, if they differ by the prefix of a wrapper.

    Raises:
        TypeError: the source is of another type.
        ValueError: prefixes differ, and the source has a part of the parameters only, so that its
            names might mean another part.
    """
    given, there = places_of(source), places_of(target)
    reading = match_prefixes(given, there)
    if not reading:
        return source
    brought = {there[reading(name)].identity() for name in given if reading(name) in there}
    # State dicts lack some of the buffers that a tensordict of a module has.
    buffers_are_known = any(place.kind == "parameter" for place in there.values())
    for name, place in there.items():
        wanted = place.kind == "parameter" or not buffers_are_known
        if wanted and place.identity() not in brought:
            raise ValueError(
                f"weights: expected {name!r} among them, as their names fit only {reading}, got "
                "none; name a part of the weights as the policy does"
            )
    renamed: Any = {reading(name): place.tensor for name, place in given.items()}
    return TensorDict(renamed).unflatten_keys(".")


def match_weights(source: Weights, target: TensorDictBase) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor of ``target`` and the new values that ``source`` has for it.

    ``source`` is a tensordict, a module or a mapping. It may lack entries, and its names may have
    another prefix, as for :func:`named_as`.

    Raises:
        TypeError: the source is of another type.
        ValueError: the target does not have an entry of the source, or has it in another shape; or
            there are different values for one tensor.
    """
    there = places_of(target)
    pairs: dict[Any, tuple[str, Tensor, Tensor]] = {}
    for name, place in places_of(named_as(target, source)).items():
        entry = there.get(name)
        if entry is None or not _fits(place.tensor, entry.tensor):
            raise ValueError(
                f"weights: {name!r}: expected the policy's names and shapes, got "
                f"{_described(place)} for {_described(entry)}; rename or reshape in "
                "_maybe_map_weights"
            )
        tensor, value = entry.tensor, place.value()
        first, _, known = pairs.setdefault(entry.identity() or name, (name, tensor, value))
        if identity(known) != identity(value) and not same_values(known, value, tensor.dtype):
            raise ValueError(
                f"weights: {name!r}: expected the values of {first!r}, since the policy has one "
                "tensor for both, got others; tie them in the trained model, or send one of them"
            )
    return [(tensor, value) for _, tensor, value in pairs.values()]


def _fits(value: Any, entry: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(entry, Tensor) and value.shape == entry.shape


def _described(place: Place | None) -> str:
    if place is None:
        return "no such entry"
    tensor: Any = place.tensor
    return str(tuple(tensor.shape)) if isinstance(tensor, Tensor) else type(tensor).__name__


@torch.no_grad()
def copy_weights(source: Weights, target: TensorDictBase) -> None:
    """Write ``source`` into ``target`` in place, leaves that require grad included.

    Entries that ``source`` lacks stay as they are. Errors are those of :func:`match_weights`, which
    are raised before anything is written.
    """
    for entry, value in match_weights(source, target):
        entry.copy_(value)
