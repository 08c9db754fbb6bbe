"""A causal language model taken apart: the decoder that makes hidden states, and its head."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusedrl.compat.torch import COMPILED_CALL, uncompiled
from fusedrl.models.signature import is_hooked
from fusedrl.models.without_adapters import WithoutAdapters


class CannotSplit(Exception):
    """A model's log-probs have to come from its own logits; the message says why."""


class Parts(NamedTuple):
    """The decoder and the head of ``base``, as :func:`fusedrl.linear_token_log_probs` takes it.

    ``decode`` calls the decoder, compiled if the decoder or the model is.
    """

    base: nn.Module
    decoder: nn.Module
    decode: Callable[..., Any]
    head: nn.Linear
    scale: float | None
    softcap: float | None
    config: Any
    embeddings: Tensor

    @property
    def weight(self) -> Tensor:
        """The weight of the head, ``[V, H]``."""
        return self.head.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias of the head, ``[V]``, if it has one."""
        return self.head.bias

    def hidden(self, **inputs: Any) -> Tensor:
        """The decoder's last hidden states, ``[B, T, H]``, in the dtype of the head."""
        states = self.decode(use_cache=False, return_dict=True, **inputs)
        hidden = states.last_hidden_state
        if torch.is_autocast_enabled(hidden.device.type):
            return hidden.to(self.weight.device)
        return hidden.to(self.weight.device, self.weight.dtype)


def unwrapped(model: Any) -> tuple[Any, AbstractContextManager[None]]:
    """The model to call, and the context in which its adapters are as they should be."""
    if isinstance(model, WithoutAdapters):
        return model.adapted, model.disabled()
    return model, nullcontext()


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this kind of device; ``None`` where it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_as(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """A block in which autocast is as :func:`autocast_of` once found it."""
    if autocast_of(device) == dtype:
        return nullcontext()
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


def device_of(model: nn.Module) -> torch.device:
    """The device on which a model takes tokens; offloaded weights are on no device."""
    devices = (parameter.device for parameter in model.parameters() if not parameter.is_meta)
    return next(devices, torch.device("cpu"))


# The packages whose parameters have a part on each rank, or whose forward waits for other ranks.
_OVER_RANKS = ("torch.distributed", "torch.nn.parallel.distributed", "deepspeed")


def ranks_of(model: nn.Module) -> int:
    """How many processes take part in a forward of the model; 1 for a model of this process."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    kinds = {type(part) for parts in (model.modules(), model.parameters()) for part in parts}
    shared = any(base.__module__.startswith(_OVER_RANKS) for kind in kinds for base in kind.__mro__)
    # DeepSpeed's third stage marks parameters, which stay those of torch.
    shared = shared or any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    return torch.distributed.get_world_size() if shared else 1


def vocabulary_of(model: Any) -> int | None:
    """How many ids a model embeds; ``None`` if it does not say."""
    try:
        return model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        return None


def classes_of(model: Any) -> int | None:
    """How many logits a token has; ``None`` if the model does not say."""
    try:
        return model.get_output_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        return getattr(config, "vocab_size", None)


def split(model: Any) -> Parts:
    """The parts of a transformers causal LM or of a peft model around one.

    Raises:
        CannotSplit: the model has no such parts, or a call of its decoder and head would leave
            something out: hooks on the model or the head, prompt learning, or the way in which a
            sharded or quantised head is multiplied.
    """
    base = uncompiled(model)
    if hasattr(base, "peft_config"):
        if any(config.is_prompt_learning for config in base.peft_config.values()):
            raise CannotSplit("it learns prompts, which enter outside of the decoder")
        if hasattr(base, "get_base_model"):  # else they are transformers' own, inside of the model
            base = base.get_base_model()
    # Asked of the class, because FSDP passes attributes on but would not see this forward.
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
    if any(is_hooked(module) for module in {model, base, head}):
        raise CannotSplit("it has hooks, which would not see the forward")
    if not hasattr(base, "config"):
        raise CannotSplit("it has no configuration")
    config = base.config.get_text_config()
    embeddings = base.get_input_embeddings().weight
    decode = _compiled_as(decoder, model, base)
    return Parts(base, decoder, decode, head, _scale(config), _softcap(config), config, embeddings)


def _compiled_as(decoder: nn.Module, *models: nn.Module) -> Callable[..., Any]:
    """The decoder, compiled as itself or else as one of the models around it; or as it is."""
    for child in models[-1].children():
        # transformers looks through torch.compile
        if child is not decoder and uncompiled(child) is decoder:
            return child
    for model in models:
        compiler = compiler_of(model)
        if compiler is not None:
            return compiler(decoder)
    return decoder


def compiler_of(module: nn.Module) -> Callable[..., Any] | None:
    """What compiles other modules as this one is compiled; ``None`` if it is not."""
    call = getattr(module, COMPILED_CALL)
    while isinstance(call, partial):  # a follower's, around what the module had
        call = call.args[0]
    if inspect.isfunction(call):  # Module.compile() keeps its settings in the call alone
        return inspect.getclosurevars(call).nonlocals.get("self")
    return getattr(module, "dynamo_ctx", None)


def _softcap(config: Any) -> float | None:
    """The cap of the logits, by the names that transformers' configurations give it."""
    names = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
    caps = (getattr(config, name, None) for name in names)
    return next((cap for cap in caps if cap is not None), None)


def _scale(config: Any) -> float | None:
    """The factor of the logits, by the names that transformers' configurations give it."""
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    return None if divisor is None else 1 / divisor
