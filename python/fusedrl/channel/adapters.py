"""Detects and merges peft adapters, without an import: a peft model has imported peft."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from fusedrl.compat.torch import buffers_of, children_of, parameters_of


def imported(module: str, name: str) -> tuple[type, ...]:
    """``(module.name,)`` for ``isinstance``, or ``()`` if the module is not imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return () if kind is None else (kind,)


def has_adapters(model: Any) -> bool:
    """Whether a model is a module with peft adapters in any of its submodules."""
    return isinstance(model, nn.Module) and any(_is_peft(type(part)) for part in model.modules())


@cache
def _is_peft(kind: type[nn.Module]) -> bool:
    """Whether modules of this class are peft's wrappers around another module."""
    classes = (
        ("peft.peft_model", "PeftModel"),
        ("peft.tuners.tuners_utils", "BaseTuner"),
        ("peft.tuners.tuners_utils", "BaseTunerLayer"),
        ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    )
    return any(issubclass(kind, imported(*path)) for path in classes)


def merged_part(name: str, module: Any) -> tuple[nn.Module, nn.Module | None]:
    """The base module inside peft's wrappers, and the outermost layer to merge, if any."""
    layer = None
    while _is_peft(type(module)):
        if isinstance(module, imported("peft.peft_model", "PeftModel")):
            if any(config.is_prompt_learning for config in module.peft_config.values()):
                raise TypeError(
                    f"weights: {name or 'the model'}: expected adapters that change weights, got "
                    "prompt learning; leave out merge_adapters"
                )
            module = module.base_model
        elif isinstance(module, imported("peft.tuners.tuners_utils", "BaseTuner")):
            module = module.model
        elif isinstance(module, imported("peft.utils.other", "ModulesToSaveWrapper")):
            active = module.active_adapters[:1]
            copies = module.modules_to_save
            module = copies[active[0]] if active and active[0] in copies else module.original_module
        elif isinstance(module, imported("peft.utils.other", "AuxiliaryTrainingWrapper")):
            module = module.token_adapter
        else:
            if set(module.active_adapters) - set(module.merged_adapters):
                layer = module if layer is None else layer
            module = module.base_layer
    return module, layer


@torch.no_grad()
def merge(layer: Any) -> nn.Module:
    """The base module of ``layer``, with its active adapters merged into the weights."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    layer.merge(adapter_names=[a for a in layer.active_adapters if a not in layer.merged_adapters])
    return layer.get_base_layer()


def replica(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """A copy of a module that uses ``copies`` of its tensors, by id; calls no hooks."""
    if id(module) not in copies:
        made = copies[id(module)] = object.__new__(type(module))
        fields = vars(module).items()
        vars(made).update((k, v.copy() if isinstance(v, (dict, list)) else v) for k, v in fields)
        for tensors in (parameters_of(made), buffers_of(made)):
            tensors.update({key: copies.get(id(tensor)) for key, tensor in tensors.items()})
        children = children_of(made)
        for key, child in children.items():
            children[key] = None if child is None else replica(child, copies)
    return copies[id(module)]
