"""A causal language model taken apart: the decoder that makes hidden states, and its head."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedrl.models.adapters import WithoutAdapters


class CannotSplit(Exception):
    """Why a model's log-probs must come from its own logits."""


class Parts(NamedTuple):
    """A decoder and its head, as :func:`fusedrl.linear_token_log_probs` takes it."""

    decoder: nn.Module
    weight: Tensor
    bias: Tensor | None
    scale: float | None
    softcap: float | None
    config: Any
    embeddings: Tensor

    def head_settings(self) -> tuple[Any, ...]:
        """What a head that is tried must not change in without being tried again."""
        return self.scale, self.softcap, self.weight.dtype, self.bias is None

    def hidden(self, **inputs: Any) -> Tensor:
        """The decoder's last hidden states, ``[B, T, H]``, in the dtype of the head."""
        states = self.decoder(use_cache=False, return_dict=True, **inputs)
        hidden = states.last_hidden_state
        if torch.is_autocast_enabled(hidden.device.type):
            return hidden.to(self.weight.device)
        return hidden.to(self.weight.device, self.weight.dtype)


def unwrapped(model: Any) -> tuple[Any, AbstractContextManager[None]]:
    """The model to call, and the context in which its adapters are as they should be."""
    if isinstance(model, WithoutAdapters):
        return model.adapted, model.disabled()
    return model, nullcontext()


def split(model: Any) -> Parts:
    """The parts of a transformers causal LM or of a peft model around one.

    Raises:
        CannotSplit: the model has no such parts, or calling its decoder would pass something by:
            hooks on the model or the head, prompt learning, sharded or quantised heads.
    """
    base = getattr(model, "_modules", {}).get("_orig_mod", model)  # of torch.compile
    if hasattr(base, "peft_config"):
        if any(config.is_prompt_learning for config in base.peft_config.values()):
            raise CannotSplit("it learns prompts, which enter outside of the decoder")
        if hasattr(base, "get_base_model"):  # else transformers' own adapters, inside of the model
            base = base.get_base_model()
    # Of the class: FSDP passes attributes on, and would not see the forward.
    if not all(hasattr(type(base), name) for name in ("get_decoder", "get_output_embeddings")):
        raise CannotSplit("it is no transformers model with a decoder and output embeddings")
    decoder, head = base.get_decoder(), base.get_output_embeddings()
    if decoder is None or decoder is base:
        raise CannotSplit("it names no decoder")
    if type(head) is not nn.Linear:
        kind = f"{type(head).__module__}.{type(head).__qualname__}"
        raise CannotSplit(f"its head is a {kind}, not a torch.nn.Linear")
    if type(head.weight) is not nn.Parameter or head.weight.is_meta or not head.weight.numel():
        raise CannotSplit("the weight of its head is sharded or offloaded")
    if any(_is_hooked(module) for module in {model, base, head}):
        raise CannotSplit("it has hooks, which would not see the forward")
    config = base.config.get_text_config()
    return Parts(
        decoder,
        head.weight,
        head.bias,
        _scale(config),
        getattr(config, "final_logit_softcapping", None),
        config,
        base.get_input_embeddings().weight,
    )


def _is_hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or hasattr(module, "_hf_hook"))


def _scale(config: Any) -> float | None:
    """The factor of the logits, by the names that transformers' configurations give it."""
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    return None if divisor is None else 1 / divisor
