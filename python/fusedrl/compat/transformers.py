"""What we need of transformers' private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention_of(config: Any) -> str | None:
    """The implementation of attention that a configuration names, if it does."""
    return getattr(config, "_attn_implementation", None)


def has_reentrant_checkpoints(module: Any) -> bool:
    """Whether a module runs its layers in checkpoints that run a backward pass of their own."""
    options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    on = module.training and getattr(module, "gradient_checkpointing", False)
    return bool(on and options.get("use_reentrant", True))


def attention_functions(config: Any) -> list[Any]:
    """What computes that attention and its masks; ``None`` for what a model has by itself."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    return [table.get(attention_of(config)) for table in tables]


def in_checkpoint(config: Any) -> Callable[[str, Tensor], list[tuple[str, Tensor]]]:
    """What a checkpoint has of a weight of the configuration's model, such as one for each expert.

    Raises:
        ImportError, ValueError: before transformers 5 it has the weight itself, and a model that is
            none of transformers' has no known checkpoint.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return lambda name, tensor: list(revert_weight_conversion(model, {name: tensor}).items())
