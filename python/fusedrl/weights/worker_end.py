"""The model of a collector that follows a scheme's channel: where it is, and its memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fusedrl.channel import WeightReader
from fusedrl.channel.layout import Layout
from fusedrl.channel.sources import module_places
from fusedrl.compat import torchrl
from fusedrl.weights.follow import is_compiled
from fusedrl.weights.policy_copies import memory_like


def is_policy(model_id: str) -> bool:
    """Whether a model is a collector's policy, or a part of it."""
    return model_id.split(".")[0] == "policy"


def find_model(collector: Any, model_id: str) -> Any:
    """A model of a collector by its attribute path.

    Raises:
        ValueError: the collector has no such model in this process.
    """
    get = getattr(collector, "get_model", None)
    try:
        return torchrl.model_at(collector, model_id) if get is None else get(model_id)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"weight_sync_schemes: expected {model_id!r} to name a model of the collector in this "
            f"process, got {error}; for a model that only workers have, call "
            "scheme.init_on_sender(model_id=..., model=...) before the collector is made"
        ) from error


def fitting_mode(
    module: nn.Module, reader: WeightReader, collector: Any
) -> Literal["alias", "copy"]:
    """``"alias"`` if dtypes and devices fit and the collector compiles nothing, else ``"copy"``."""
    dtypes = {entry.name: entry.dtype for entry in reader.layout.entries}
    fits = all(
        place.tensor.device == reader.device and place.tensor.dtype == dtypes[place.name]
        for place in module_places(module)
        if place.kind == "parameter" and place.name in dtypes
    )
    return "alias" if fits and not is_compiled(collector) else "copy"


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers that are not part of a state dict, by name."""
    places = module_places(module)
    return {place.name: place.tensor.detach().clone() for place in places if not place.persistent}


def materialise(
    module: nn.Module, layout: Layout, buffers: Mapping[str, Tensor], device: torch.device
) -> None:
    """Allocate memory for the tensors of a module on meta, and tie those that the layout ties.

    torchrl sends policies to workers on meta, buffers included, and unties their weights.

    Args:
        module: is changed in place; the content of its new memory is arbitrary.
        layout: the layout of the channel that will fill the memory.
        buffers: values of the buffers that the layout does not have.
        device: where the memory lies.

    Raises:
        ValueError: the module has weights on meta that nothing will fill. Nothing has changed then.
    """
    empty = [place for place in module_places(module) if place.tensor.is_meta]
    known = {*layout.view_of, *buffers}
    if lost := [place.name for place in empty if place.name not in known]:
        raise ValueError(
            f"policy: expected weights that the scheme sends, got {len(lost)} that it does not: "
            f"{', '.join(lost[:3])}; make the workers' policies by policy_factory="
        )
    made: dict[int, Tensor] = {}
    for place in empty:
        assert place.home is not None
        if place.name in buffers:
            place.home[place.key] = buffers[place.name].to(device, copy=True)
            continue
        view = layout.view_of[place.name]
        if view not in made:
            made[view] = memory_like(place.tensor, device)
        place.home[place.key] = made[view]
