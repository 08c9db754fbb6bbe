"""Which modules are peft's, and merging them; a model that has some has imported peft."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from fusedrl.compat.torch import buffers_of, children_of, parameters_of


def imported(module: str, name: str) -> tuple[type, ...]:
    """The class ``name`` of ``module`` for isinstance, or ``()`` if it was never imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return () if kind is None else (kind,)


def has_adapters(model: Any) -> bool:
    """Whether a model is a module of which any part is adapted by peft."""
    return isinstance(model, nn.Module) and any(_adapts(type(part)) for part in model.modules())


@cache
def _adapts(kind: type[nn.Module]) -> bool:
    """Whether a module is one of peft's, around the module that it adapts."""
    homes = (
        ("peft.peft_model", "PeftModel"),
        ("peft.tuners.tuners_utils", "BaseTuner"),
        ("peft.tuners.tuners_utils", "BaseTunerLayer"),
        ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    )
    return any(issubclass(kind, imported(home, name)) for home, name in homes)


def merged_part(name: str, module: Any) -> tuple[nn.Module, nn.Module | None]:
    """The base module that ``module`` stands for, and the layer to merge into it, if any."""
    layer = None
    while _adapts(type(module)):
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
    """The base of ``layer``, after its active adapters were merged into its weights."""
    if hasattr(layer, "unload_and_optionally_merge_module"):
        return layer.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    layer.merge(adapter_names=[a for a in layer.active_adapters if a not in layer.merged_adapters])
    return layer.get_base_layer()


def replica(module: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """A copy of a module, with ``copies`` of its tensors by their ids; no hooks are called."""
    if id(module) not in copies:
        made = copies[id(module)] = object.__new__(type(module))
        fields = vars(module).items()
        vars(made).update((k, v.copy() if isinstance(v, (dict, list)) else v) for k, v in fields)
        for home in (parameters_of(made), buffers_of(made)):
            home.update({key: copies.get(id(tensor)) for key, tensor in home.items()})
        children = children_of(made)
        for key, child in children.items():
            children[key] = None if child is None else replica(child, copies)
    return copies[id(module)]
