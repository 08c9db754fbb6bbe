"""Models whose results depend on the length of a call, and how long a call may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from fusedrl.compat.torch import buffers_of, parameters_of

# Rotary embeddings whose frequencies depend on the longest position of the call.
_FOLLOWING = ("dynamic", "longrope", "su")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# Learned positions may begin at an offset, as those of OPT and BART do.
_OFFSET = 8


def shared_below(modules: Sequence[nn.Module]) -> int | None:
    """Sequences that are shorter than this get the same results whatever else is in the call.

    ``modules`` are the model and all modules in it. ``None`` if no rotary embedding of the model
    says that it depends on the length of the call.
    """
    bounds = []
    config = getattr(modules[0], "config", None)
    for owner, settings in _rope_settings(config):
        if follows_length(settings.get("rope_type", settings.get("type"))):
            bounds.append(_bound(settings, owner, config))
    for module in modules:
        if _may_have(module, "rope_type") and follows_length(getattr(module, "rope_type", None)):
            own = getattr(module, "config", None)
            trained = {"max_position_embeddings": getattr(module, "original_max_seq_len", None)}
            bounds.append(_bound(trained, own, config))
    return min(bounds, default=None)


def _may_have(module: nn.Module, name: str) -> bool:
    """Whether a lookup is worth it: ``nn.Module.__getattr__`` is slow for a missing name."""
    kind: Any = type(module)
    own = kind.__getattr__ is not nn.Module.__getattr__
    return own or name in vars(module) or hasattr(kind, name)


def follows_length(rope_type: Any) -> bool:
    """Whether a rotary type, or one of those by layer type, depends on the length of the call."""
    if isinstance(rope_type, Mapping):
        return any(map(follows_length, rope_type.values()))
    return isinstance(rope_type, str) and any(name in rope_type for name in _FOLLOWING)


def _bound(*holders: Any) -> int:
    """The smallest length at which frequencies may change; 0 if it is not known."""
    names = ("original_max_position_embeddings", "max_position_embeddings")
    told = []
    for holder in holders:
        values = holder if isinstance(holder, Mapping) else getattr(holder, "__dict__", {})
        told += [values[name] for name in names if isinstance(values.get(name), int)]
    return min(told, default=0)


def _rope_settings(config: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Each mapping in a configuration and in those nested in it, with its parent."""
    pending = [config]
    while pending:
        owner = pending.pop()
        nested = list(getattr(owner, "__dict__", {}).values())
        while nested:
            value = nested.pop()
            if isinstance(value, Mapping):
                yield owner, value
                nested += value.values()
            elif hasattr(value, "model_type"):
                pending.append(value)


def context_of(config: Any) -> int | None:
    """The number of positions that a configuration names, or ``None``."""
    told = (getattr(config, name, None) for name in _CONTEXTS)
    return next((value for value in told if isinstance(value, int)), None)


def positions_held(model: Any, context: int) -> bool:
    """Whether a model holds a table of as many positions as its context has, and no more.

    Such a table may be learned positions, or sines or a causal mask that are computed once. Rotary
    embeddings, ALiBi and recurrent states have none, and run beyond the context.
    """
    inputs = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for module in model.modules():
        rows = getattr(module, "num_embeddings", None)
        if isinstance(rows, int) and module is not inputs and 0 <= rows - context <= _OFFSET:
            return True
        own = [*buffers_of(module).values()]
        own += [weight for name, weight in parameters_of(module).items() if "pos" in name]
        if any(x is not None and x.dim() > 1 and context in x.shape for x in own):
            return True
    return False
