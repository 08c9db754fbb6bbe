"""Models whose results depend on the length of a call, and how long a call may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusedrl.compat.torch import buffers_of, parameters_of

# Rotary embeddings whose frequencies depend on the longest position of the call.
_FOLLOWING = ("dynamic", "longrope", "su")
_TRAINED = ("original_max_position_embeddings", "max_position_embeddings")
_CONTEXTS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
# Learned positions may begin at an offset, as those of OPT and BART do.
_OFFSET = 8


def shared_below(config: Any) -> int | None:
    """Sequences that are shorter than this get the same results whatever else is in the call.

    ``None`` if no rotary embedding of the configuration says that it depends on the length of the
    call; 0 if it does not say from which length on.
    """
    settings = [*_settings(config)]
    if not any(_follows(x.get("rope_type", x.get("type"))) for x in settings):
        return None
    told = [x.get(name) for x in settings for name in _TRAINED]
    return min((length for length in told if isinstance(length, int)), default=0)


def _follows(rope_type: Any) -> bool:
    """Whether a rotary type depends on the length of the call."""
    return isinstance(rope_type, str) and any(name in rope_type for name in _FOLLOWING)


def _settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """A configuration, those nested in it, and each mapping in them."""
    pending = [config]
    while pending:
        value = pending.pop()
        value = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        yield value
        pending += [x for x in value.values() if isinstance(x, Mapping) or hasattr(x, "model_type")]


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
