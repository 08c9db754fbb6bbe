"""Which modules peft has adapted, and the weights of the base model with adapters merged in.

peft is never imported: a model that has adapters has imported it.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn

from fusedrl.channel.tensors import check_supported, whole
from fusedrl.compat.torch import buffers_of, children_of, parameters_of


def loaded(module: str, name: str) -> tuple[type, ...]:
    """The class ``name`` of ``module`` for isinstance, or ``()`` if it was never imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return () if kind is None else (kind,)


def has_adapters(module: nn.Module) -> bool:
    """Whether any part of ``module`` is adapted by peft."""
    return any(_adapts(type(part)) for part in module.modules())


@cache
def _adapts(kind: type[nn.Module]) -> bool:
    """Whether a module is one of peft's, around the module that it adapts."""
    homes = (
        ("peft.peft_model", "PeftModel"),
        ("peft.tuners.tuners_utils", "BaseTuner"),
        ("peft.tuners.tuners_utils", "BaseTunerLayer"),
        ("peft.utils.other", "AuxiliaryTrainingWrapper"),
    )
    return any(issubclass(kind, loaded(home, name)) for home, name in homes)


def merged_part(name: str, module: Any) -> tuple[nn.Module, nn.Module | None]:
    """The base module that ``module`` stands for, and the layer to merge into it, if any.

    Raises:
        TypeError: the adapters do not change weights, as those of prompt learning do not.
    """
    layer = None
    while _adapts(type(module)):
        if isinstance(module, loaded("peft.peft_model", "PeftModel")):
            if any(config.is_prompt_learning for config in module.peft_config.values()):
                raise TypeError(
                    f"weights: {name or 'the model'}: expected adapters that change weights, got "
                    "prompt learning; leave out merge_adapters"
                )
            module = module.base_model
        elif isinstance(module, loaded("peft.tuners.tuners_utils", "BaseTuner")):
            module = module.model
        elif isinstance(module, loaded("peft.utils.other", "ModulesToSaveWrapper")):
            active = module.active_adapters[:1]
            copies = module.modules_to_save
            module = copies[active[0]] if active and active[0] in copies else module.original_module
        elif isinstance(module, loaded("peft.utils.other", "AuxiliaryTrainingWrapper")):
            module = module.token_adapter
        else:
            if set(module.active_adapters) - set(module.merged_adapters):
                layer = module if layer is None else layer
            module = module.base_layer
    return module, layer


@torch.no_grad()
def merge(layer: nn.Module) -> nn.Module:
    """A copy of the base of ``layer`` with the active adapters in its weights."""
    # peft merges in place, and unmerging leaves rounding errors, so the merge is done in a copy.
    replica: Any = _replica(layer, {}, "")
    if hasattr(replica, "unload_and_optionally_merge_module"):
        return replica.unload_and_optionally_merge_module(
            merge=True, safe_merge=False, adapter_names=None
        )
    replica.merge(
        adapter_names=[a for a in replica.active_adapters if a not in replica.merged_adapters]
    )
    return replica.get_base_layer()


def _replica(module: nn.Module, known: dict[int, nn.Module], prefix: str) -> nn.Module:
    """A deep copy of the weights alone: sharded ones are made whole, and no hooks are called."""
    if id(module) in known:
        return known[id(module)]
    replica = known[id(module)] = object.__new__(type(module))
    replica.__dict__.update(
        {k: v.copy() if isinstance(v, (dict, list)) else v for k, v in vars(module).items()}
    )
    for key, tensor in parameters_of(module).items():
        if tensor is not None:
            check_supported(prefix + key, tensor)
            clone = whole(tensor).clone(memory_format=torch.preserve_format)
            parameters_of(replica)[key] = nn.Parameter(clone, requires_grad=False)
    for key, tensor in buffers_of(module).items():
        buffers_of(replica)[key] = None if tensor is None else whole(tensor).clone()
    for key, child in children_of(module).items():
        copied = None if child is None else _replica(child, known, f"{prefix}{key}.")
        children_of(replica)[key] = copied
    return replica
