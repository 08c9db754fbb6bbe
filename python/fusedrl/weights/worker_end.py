"""The model of a collector that follows a scheme's channel: where it is, and its memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchrl.modules.inference_server import InferenceServer

from fusedrl.channel import WeightReader
from fusedrl.channel.follow import followers_of
from fusedrl.channel.layout import Layout
from fusedrl.channel.tensors import weights_in
from fusedrl.compat import torch as torch_names
from fusedrl.compat import torchrl
from fusedrl.weights.follow import is_compiled, module_of, patch_attribute

logger = logging.getLogger("fusedrl")
POLICY_STATE = "policy_state_dict"  # where a collector's state has the weights of its policy


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
    """``"alias"`` if dtypes and devices fit, and the collector neither compiles nor writes them."""
    dtypes = {entry.name: entry.dtype for entry in reader.layout.entries}
    fits = all(
        place.tensor.device == reader.device and place.tensor.dtype == dtypes[place.name]
        for place in weights_in(module)
        if place.kind == "parameter" and place.name in dtypes
    )
    in_place = is_compiled(collector) or isinstance(collector, InferenceServer)
    return "alias" if fits and not in_place else "copy"


def unsaved_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the buffers that are not part of a state dict, by name."""
    places = weights_in(module)
    return {place.name: place.tensor.detach().clone() for place in places if not place.saved}


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
    empty = [place for place in weights_in(module) if place.tensor.is_meta]
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
            made[view] = _memory_like(place.tensor, device)
        place.home[place.key] = made[view]


def replace_by_copy(collector: Any, model_id: str, layout: Layout) -> Callable[[], None]:
    """Replace the policy of a collector in the trainer's process by a copy.

    The trainer goes on with the original, which its optimiser may write at any time. Weights that
    no version brings, such as those of a part that is not published, stay shared.

    Args:
        collector: torchrl's ``Collector``, or ours of dialogs.
        model_id: the attribute path of the policy, or of the part of it that is published.
        layout: the layout of the channel that the copy will follow.

    Returns:
        A function that gives the original back to the collector.

    Raises:
        TypeError: something in the policy cannot be copied.
        ValueError: the policy is a copy already, or the path is that of another model.
    """
    policy = getattr(collector.policy, "module", collector.policy)
    if not is_policy(model_id) or followers_of(policy):
        raise ValueError(
            "weight_sync_schemes: expected one for the policy alone in the trainer's process, got "
            f"{model_id!r}; use 'policy' for all of it, and another process for other models"
        )
    names = ("policy", torchrl.UNCOMPILED_POLICY)
    whole = tuple(getattr(collector, name) for name in names)
    module = module_of(collector.get_model(model_id))
    copies = _copied(whole, module, layout)
    undo = ExitStack()
    for name, copied in zip((*names, torchrl.COMPILED_POLICY), (*copies, None), strict=True):
        undo.callback(patch_attribute(collector, name, copied))
    return undo.close


def _copied(whole: tuple[Any, ...], module: nn.Module, layout: Layout) -> tuple[Any, ...]:
    """A deep copy, whose weights that the layout has are memory to load into; others are shared.

    Args:
        whole: the objects to copy, such as a policy.
        module: the part of them that the layout describes.
        layout: the layout of the weights that will be loaded.
    """
    memo: dict[int, Any] = {}
    for place in weights_in(module):
        is_brought = place.kind == "parameter" and place.name in layout.view_of
        if is_brought and id(place.tensor) not in memo:
            memo[id(place.tensor)] = _memory_like(place.tensor, place.tensor.device)
    for part in whole:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                memo.setdefault(id(parameter), parameter)
            for child in part.modules():
                compiled = getattr(child, torch_names.COMPILED_CALL)
                if compiled is not None and id(compiled) not in memo:
                    memo[id(compiled)] = None  # a compiled call would compute with the original
                    logger.warning(
                        "policy: expected one that the collector compiles, got one whose compile() "
                        "was called: the collector's copy is not compiled; pass compile_policy="
                    )
    try:
        return copy.deepcopy(whole, memo)
    except (TypeError, RuntimeError) as error:
        raise TypeError(
            "policy: expected one that copy.deepcopy takes, since a copy computes with the "
            f"weights of the channel, got {error}; leave out what cannot be copied, or collect in "
            "another process (AsyncCollector)"
        ) from error


def _memory_like(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of arbitrary content."""
    memory = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(memory, requires_grad=False) if isinstance(tensor, nn.Parameter) else memory
