"""Split a causal language model into its decoder, which computes hidden states, and its head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fusedrl.channel.tensors import is_dtensor, part_of_rank
from fusedrl.compat.accelerate import has_hook
from fusedrl.compat.torch import (
    COMPILED_CALL,
    buffers_of,
    children_of,
    class_of,
    has_hooks,
    hooks_of,
    is_fully_sharded,
    parameters_of,
    uncompiled,
)
from fusedrl.compat.transformers import attention_functions, attention_of
from fusedrl.models.as_forward import as_forward
from fusedrl.models.other_adapters import OtherAdapters

# Types that consist of only decoder and head, in which only attention mixes tokens. tests/models
# has sequences longer than their windows; the comparison at the first call is too short for them.
TESTED = frozenset(
    (
        *("cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral"),
        *("olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3", "starcoder2"),
    )
)
# Libraries whose forwards, and wrappers of forwards such as autocast, are trusted.
MAKERS = frozenset(("transformers", "torch", "accelerate", "peft", "trl"))
# In addition, libraries that replace layers inside a decoder.
MAKERS_OF_LAYERS = MAKERS | {"liger_kernel", "bitsandbytes", "torchao", "kernels"}
# Rotary embeddings whose frequencies depend on the longest position of a call.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")
_TRAINED_LENGTHS = ("original_max_position_embeddings", "max_position_embeddings")
ATTENTIONS = frozenset(("eager", "sdpa", "flash_attention_2", "flash_attention_3"))


class Parts(NamedTuple):
    """The decoder and the head of ``base``, which ``model`` is or wraps.

    ``decode`` calls the decoder, compiled if the decoder or the model is. If ranks share the model
    (``shared``), decoder and head have to run :meth:`within` its forward; if ``gathered``, the
    head's weight is complete only there.
    """

    model: nn.Module
    base: nn.Module
    decoder: nn.Module
    decode: Callable[..., Any]
    head: nn.Linear
    scale: float | None
    softcap: float | None
    config: Any
    shared: bool
    gathered: bool

    @property
    def embeddings(self) -> Tensor:
        """The weight that embeds ids."""
        base: Any = self.base
        return base.get_input_embeddings().weight

    @property
    def weight(self) -> Tensor:
        """The weight of the head, ``[V, H]``, or this rank's shard of it."""
        return part_of_rank(self.head.weight)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the linear ops except hidden states and weight, also those for a shard."""
        weight: Any = self.head.weight
        bias = None if self.head.bias is None else part_of_rank(self.head.bias)
        found = {"bias": bias, "softcap": self.softcap, "scale": self.scale}
        if self.sharded:
            mesh, classes = weight.device_mesh, len(weight)
            each = -(-classes // mesh.size())  # as torch.chunk cuts it
            found["vocab_offset"] = min(mesh.get_local_rank() * each, classes)
            found["vocab_group"] = mesh.get_group()
        return found

    @property
    def sharded(self) -> bool:
        """Whether each rank has a shard of the head, and the ops combine their results."""
        return is_dtensor(self.head.weight) and not self.gathered

    def hidden(self, **inputs: Any) -> Tensor:
        """The decoder's last hidden states, ``[B, T, H]``, in the dtype of the head."""
        states = self.decode(use_cache=False, return_dict=True, **inputs)
        hidden = states.last_hidden_state
        if torch.is_autocast_enabled(hidden.device.type):
            return hidden.to(self.weight.device)
        return hidden.to(self.weight.device, self.weight.dtype)

    def within(self, function: Callable[[], tuple[Tensor, ...]], ids: Tensor) -> tuple[Tensor, ...]:
        """The results of ``function``, run inside the model's forward if ranks share the model.

        There FSDP has gathered the weights, and FSDP and DDP see the results.
        """
        if not self.shared:
            return function()
        return as_forward(self.base, lambda *_: function(), lambda: self.model(input_ids=ids))

    def at_head(
        self, hidden: Tensor, function: Callable[[Tensor], tuple[Tensor, ...]]
    ) -> tuple[Tensor, ...]:
        """``function`` applied to hidden states, while the head's weight is gathered."""
        if not is_fully_sharded(self.head):
            return function(whole_of(hidden))
        return as_forward(self.head, function, lambda: self.head(hidden))


def whole_of(values: Any) -> Tensor:
    """The full tensor of a DTensor; other tensors are returned unchanged."""
    return values.full_tensor() if is_dtensor(values) else values


def autocast_of(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast for this device type; ``None`` if it is off."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def device_of(model: nn.Module) -> torch.device:
    """The device for a model's inputs: that of its first weight that is not offloaded."""
    devices = (p.device for p in chain_of(model)[-1].parameters() if not p.is_meta)
    return next(devices, torch.device("cpu"))


def chain_of(model: Any) -> list[Any]:
    """A model and all models that it wraps, down to the one that has a decoder and a head."""
    inner = uncompiled(model)
    if isinstance(model, OtherAdapters):
        inner = model.adapted
    elif isinstance(model, DistributedDataParallel):
        inner = model.module
    # adapters that transformers adds itself do not wrap the model
    elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    return [model] if inner is model else [model, *chain_of(inner)]


def vocabulary_of(model: Any) -> int | None:
    """The number of ids that a model embeds; ``None`` if unknown."""
    return _size_of(model, "get_input_embeddings", "num_embeddings")


def classes_of(model: Any) -> int | None:
    """The number of logits per token; ``None`` if unknown."""
    return _size_of(model, "get_output_embeddings", "out_features")


def _size_of(model: Any, getter: str, size: str) -> int | None:
    try:
        return getattr(getattr(chain_of(model)[-1], getter)(), size)
    except (AttributeError, NotImplementedError):
        return None


def text_config(model: Any) -> Any:
    """The configuration of a model's text decoder, or its only one; ``None`` without any."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def shared_below(config: Any) -> int | None:
    """The length below which results of a sequence do not depend on other sequences in the call.

    ``None`` if no rotary embedding of the configuration depends on the length of the call; 0 if
    the configuration has no threshold for it.
    """
    settings = [*_settings(config)]
    types = [str(x.get("rope_type", x.get("type"))) for x in settings]
    if not any(name in each for each in types for name in _LENGTH_DEPENDENT):
        return None
    lengths = [x.get(name) for x in settings for name in _TRAINED_LENGTHS]
    return min((length for length in lengths if isinstance(length, int)), default=0)


def _settings(config: Any) -> Iterator[dict[str, Any]]:
    """A configuration as a dict, and all configurations and dicts nested in it."""
    value = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    yield value
    for x in value.values():
        if isinstance(x, dict) or hasattr(x, "model_type"):
            yield from _settings(x)


def parts_of(model: Any) -> Parts | None:
    """The parts of a model, valid only if it :func:`fits`; ``None`` if its class names none."""
    chain = chain_of(model)
    base = chain[-1]
    # Of the class: FSDP forwards attributes, but a direct call would bypass it.
    named = all(hasattr(type(base), name) for name in ("get_decoder", "get_output_embeddings"))
    decoder, config = base.get_decoder() if named else None, text_config(base)
    if decoder is None or decoder is base or config is None:
        return None
    head = base.get_output_embeddings()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    gathered = any(map(is_fully_sharded, (*chain, head)))
    return Parts(
        model,
        base,
        decoder,
        _compiled_as(decoder, *chain),
        head,
        scale=1 / divisor if divisor else getattr(base, "logit_scale", None),  # Cohere
        softcap=getattr(config, "final_logit_softcapping", None),
        config=config,
        shared=gathered or any(isinstance(m, DistributedDataParallel) for m in chain),
        gathered=gathered,
    )


def fits(parts: Parts | None) -> str | None:
    """The reason why a model cannot be split, so that its logits are needed; ``None`` if it can.

    It has to be a transformers causal LM of a :data:`TESTED` type, or a wrapper of peft or torch
    around one, that does nothing but call its decoder and head.
    """
    if parts is None:
        return "it is not a transformers model with a decoder and output embeddings"
    kind, attention = parts.config.model_type, attention_of(parts.config)
    if kind not in TESTED or attention not in ATTENTIONS:
        return f"its type {kind} with {attention} attention is not tested"
    if not all(map(_is_known, attention_functions(parts.config))):
        return f"its {attention} attention is not the one of transformers"
    head: Any = parts.head
    kind = class_of(head)
    if kind is not nn.Linear:
        return f"its head is a {kind.__module__}.{kind.__qualname__}, not a torch.nn.Linear"
    chain = chain_of(parts.model)
    for module in (*chain, parts.decoder, head):
        if not _is_known(module.forward):
            return f"the forward of its {type(module).__name__} is not defined by its library"
    weight = head.weight
    known = parts.gathered or nn.Parameter is type(weight)
    if is_dtensor(weight) and not known:  # may be sharded over the classes
        known = weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0)
    if not known or weight.is_meta or not weight.numel():
        return "the weight of its head is sharded or offloaded"
    if any(has_hooks(module) or has_hook(module) for module in {*chain, head}):
        return "it has hooks, which would not run"
    # For example a bias, a temperature or a learned prompt.
    around = modules_of(chain[0], without=(parts.decoder, head))
    if any(parameters_of(module) or buffers_of(module) for module in around):
        return "it has parameters or buffers outside its decoder and head"
    adapters = [x for each in chain for x in getattr(each, "peft_config", {}).values()]
    if any(getattr(x, "alora_invocation_tokens", None) for x in adapters):
        return "it has adapters that certain tokens activate"
    return None


def _compiled_as(decoder: nn.Module, *models: nn.Module) -> Callable[..., Any]:
    """The decoder, compiled if it or one of the models around it is compiled."""
    for child in models[-1].children():
        # get_decoder() of transformers returns the uncompiled module
        if child is not decoder and uncompiled(child) is decoder:
            return child
    for model in models:
        compiler = compiler_of(model)
        if compiler is not None:
            return compiler(decoder)
    return decoder


def compiler_of(module: nn.Module) -> Callable[..., Any] | None:
    """A function that compiles a module with the settings of this one; ``None`` if uncompiled."""
    call = getattr(module, COMPILED_CALL)
    if inspect.isfunction(call):  # Module.compile() stores its settings only in the closure
        return inspect.getclosurevars(call).nonlocals.get("self")
    return getattr(module, "dynamo_ctx", None)


def _is_known(forward: Any, makers: frozenset[str] = MAKERS) -> bool:
    """Whether a forward and all its wrappers are defined by the libraries ``makers``."""
    while forward is not None:
        forward = getattr(forward, "__func__", forward)
        home = getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__)
        if home.partition(".")[0] not in makers:
            return False
        forward = getattr(forward, "__wrapped__", None)
    return True


def foreign_in(decoder: nn.Module) -> str | None:
    """A forward or a hook in a decoder that no known library defines; ``None`` without one."""
    for module in modules_of(decoder):
        hooks = [hook for kind in hooks_of(module) for hook in kind.values()]
        for what, functions in (("the forward", [module.forward]), ("a hook", hooks)):
            if not all(_is_known(function, MAKERS_OF_LAYERS) for function in functions):
                return f"{what} of its {type(module).__name__}"
    return None


def modules_of(model: nn.Module, without: Sequence[Any] = ()) -> list[nn.Module]:
    """A model and all its modules except those in ``without`` and their submodules.

    Several times as fast as ``model.modules()``.
    """
    found = {model: None}
    pending = [model]
    while pending:
        for module in children_of(pending.pop()).values():
            if module is not None and module not in found and module not in without:
                found[module] = None
                pending.append(module)
    return list(found)
