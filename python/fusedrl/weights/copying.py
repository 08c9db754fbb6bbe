"""Copies weights of any form into existing tensors."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from fusedrl.channel.layout import Layout
from fusedrl.channel.sources import Place, places_of, refuse_other_state

Weights = Any  # a tensordict, or what the hooks of a subclass understand


def unwrap(weights: Weights) -> Weights:
    """The weights of a module without their autograd graph; anything else as it is."""
    # TensorDictParams are both.
    if isinstance(weights, nn.Module) and not isinstance(weights, TensorDictBase):
        refuse_other_state(weights)
        weights = TensorDict.from_module(weights)
        return weights.data  # pyright: ignore[reportAttributeAccessIssue]
    return weights


def named_as(target: TensorDictBase, source: Weights) -> TensorDictBase:
    """What ``source`` has for ``target``, under all names that the target has for it.

    Raises:
        TypeError, ValueError: as for :func:`copy_weights`.
    """
    layout = Layout.of(target)
    values = {name: place.value() for name, place in layout.match(source, partial=True).items()}
    first_names = {name: layout.stored[index].name for name, index in layout.view_of.items()}
    named = {name: values[first] for name, first in first_names.items() if first in values}
    return TensorDict(named).unflatten_keys(".")  # pyright: ignore[reportArgumentType]


def pairs(source: Weights, target: TensorDictBase) -> list[tuple[Tensor, Place]]:
    """The tensors of ``target`` to write, with the places of what ``source`` has for them.

    Raises:
        TypeError, ValueError: as for :func:`copy_weights`.
    """
    there, brought = places_of(target), places_of(source)
    if not there and not brought:
        return []
    matched = Layout.of(target).match(source, partial=True)
    return [(there[name].tensor, place) for name, place in matched.items()]


@torch.no_grad()
def copy_weights(source: Weights, target: TensorDictBase) -> None:
    """Write ``source`` into ``target`` in place, leaves that require grad included.

    Entries that ``source`` lacks stay as they are.

    Raises:
        TypeError: the source is no tensordict, module or mapping of tensors.
        ValueError: the target does not have an entry of the source, or has it in another shape; or
            there are different values for one tensor. Nothing is written then.
    """
    for tensor, place in pairs(source, target):
        tensor.copy_(place.value())


def write_weights(policy: Any, weights: Weights) -> None:
    """Write weights of any form into a policy, in place.

    Args:
        policy: a module, or an object that has one as its ``model``.
        weights: a tensordict, a module or a mapping, as for :func:`copy_weights`.

    Raises:
        TypeError, ValueError: as for :func:`copy_weights`. No weight has changed then.
        RuntimeError: the policy has no module.
    """
    for module in (policy, getattr(policy, "model", None)):
        if isinstance(module, nn.Module):
            copy_weights(weights, TensorDict.from_module(module))  # pyright: ignore[reportArgumentType]
            return
    raise RuntimeError(
        f"policy: expected a module, or what has one as its model, got {type(policy).__name__}; "
        "pass a weight_updater= that knows it"
    )
