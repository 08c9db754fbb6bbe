"""What we need of transformers' private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusedrl.compat.library import Library

TRANSFORMERS = Library("transformers", tried="5.23.0")


@TRANSFORMERS.needs("transformers:PretrainedConfig._attn_implementation")
def attention_of(config: Any) -> str | None:
    """The implementation of attention that a configuration names, if it does."""
    return getattr(config, "_attn_implementation", None)


@TRANSFORMERS.needs(
    "transformers.core_model_loading:revert_weight_conversion",
    "transformers:AutoModelForCausalLM._model_mapping",
)
def in_checkpoint(config: Any) -> Callable[[str, Tensor], list[tuple[str, Tensor]]] | None:
    """What a checkpoint has of a weight of the configuration's model, such as one for each expert.

    ``None`` before transformers 5, where it has the weight itself, and for a model that is none of
    transformers', of which no checkpoint is known.
    """
    from transformers import AutoModelForCausalLM

    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:
        return None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return lambda name, tensor: list(revert_weight_conversion(model, {name: tensor}).items())
