"""Models whose results depend on the length of a call, and how long a sequence may be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusedrl.compat.torch import buffers_of, parameters_of
from fusedrl.models.split import text_config

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
    types = [str(x.get("rope_type", x.get("type"))) for x in settings]
    if not any(name in each for each in types for name in _FOLLOWING):
        return None
    told = [x.get(name) for x in settings for name in _TRAINED]
    return min((length for length in told if isinstance(length, int)), default=0)


def _settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """A configuration, those nested in it, and each mapping in them."""
    value = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    yield value
    for x in value.values():
        if isinstance(x, Mapping) or hasattr(x, "model_type"):
            yield from _settings(x)


def check_context(model: Any, lengths: Sequence[int]) -> None:
    """Refuse a sequence with more tokens than the model has positions for, where it has a bound.

    Only a table of positions is a bound, beyond which a GPU's error would end the process.
    """
    told = [getattr(text_config(model), name, None) for name in _CONTEXTS]
    context = next((value for value in told if isinstance(value, int)), None)
    longest = max(lengths, default=0)
    if context is not None and longest > context and _has_table(model, context):
        raise ValueError(
            f"tokens: sequence {lengths.index(longest)}: expected at most {context} tokens, the "
            f"model's context, got {longest}; truncate or split it"
        )


def _has_table(model: Any, context: int) -> bool:
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
