"""The private names of transformers that fusedrl uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def attention_of(config: Any) -> str | None:
    """The attention implementation that a configuration names, or ``None``."""
    return getattr(config, "_attn_implementation", None)


def has_reentrant_checkpoints(module: Any) -> bool:
    """Whether a module checkpoints its layers reentrantly, with nested backward passes."""
    options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    on = module.training and getattr(module, "gradient_checkpointing", False)
    return bool(on and options.get("use_reentrant", True))


def attention_functions(config: Any) -> list[Any]:
    """The functions for that attention and its masks; ``None`` for those in the model itself."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
    return [table.get(attention_of(config)) for table in tables]


def in_checkpoint(config: Any) -> Callable[[str, Tensor], list[tuple[str, Tensor]]]:
    """The function that converts a weight of the model to its checkpoint's form, such as per
    expert.

    Raises:
        ImportError, ValueError: before transformers 5, which needs no conversion; or the model is
            not one of transformers', so that its checkpoint is not known.
    """
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return lambda name, tensor: list(revert_weight_conversion(model, {name: tensor}).items())
