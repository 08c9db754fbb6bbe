"""Copies of models, which the trainer's weights reach through a channel only."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from fusedrl.channel.following import version_of
from fusedrl.channel.layout import Layout
from fusedrl.channel.sources import module_places
from fusedrl.compat import torch as torch_names
from fusedrl.compat import torchrl
from fusedrl.weights.follow import FollowedCall, module_of, patch_attribute

logger = logging.getLogger("fusedrl")


def replace_by_copy(collector: Any, model_id: str, layout: Layout) -> Callable[[], None]:
    """Replace the policy of a collector in the trainer's process by a copy.

    The trainer goes on with the original, which its optimiser may write at any time. Weights that
    no version brings, such as the frozen base of a model with adapters, stay shared.

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
    if model_id.split(".")[0] != "policy" or version_of(collector.policy) is not None:
        raise ValueError(
            "weight_sync_schemes: expected one for the policy alone in the trainer's process, got "
            f"{model_id!r}; use 'policy' for all of it, and another process for other models"
        )
    names = ("policy", torchrl.UNCOMPILED_POLICY)
    whole = tuple(getattr(collector, name) for name in names)
    module = module_of(collector.get_model(model_id))
    copies = dict(zip(names, copied_for(whole, module, layout), strict=True))
    undo = ExitStack()
    for name, copied in {**copies, torchrl.COMPILED_POLICY: None}.items():
        undo.callback(patch_attribute(collector, name, copied))
    return undo.close


def copied_for(
    whole: tuple[Any, ...], module: nn.Module, layout: Layout, memory: bool = True
) -> tuple[Any, ...]:
    """A deep copy of ``whole``, for the weights of a layout to be loaded into.

    Args:
        whole: the objects to copy, such as a policy.
        module: the part of them that the layout describes; its parameters are copied without their
            values.
        layout: the layout of the weights that will be loaded. Other weights stay shared.
        memory: whether to allocate memory to load into; views take its place otherwise.

    Raises:
        TypeError: something cannot be copied.
    """
    memo: dict[int, Any] = {}
    for place in module_places(module):
        is_brought = place.kind == "parameter" and place.name in layout.view_of
        if is_brought and id(place.tensor) not in memo:
            memo[id(place.tensor)] = memory_like(place.tensor, place.tensor.device, memory)
    for part in whole:
        if isinstance(part, nn.Module):
            for parameter in part.parameters():
                memo.setdefault(id(parameter), parameter)
            for child in part.modules():
                compiled = getattr(child, torch_names.COMPILED_CALL)
                if not isinstance(compiled, FollowedCall | None) and id(compiled) not in memo:
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


def memory_like(tensor: Tensor, device: torch.device, whole: bool = True) -> Tensor:
    """A tensor of arbitrary content, backed by a single element unless ``whole``."""
    if whole:
        memory = torch.empty_like(tensor, device=device, requires_grad=False)
    else:
        memory = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
    return nn.Parameter(memory, requires_grad=False) if isinstance(tensor, nn.Parameter) else memory
