"""What a model allows: a list of types, and one comparison with the model's own logits.

The decoder and the head that a model names may not be the whole model. It may mix the sequences
that share a row, and padding or a longer call may change its numbers: log-probs that look plausible
and are wrong. So only types that are tested are taken apart (``split.py``), and only if they agree
with their own logits where they are first used. Others are slow and right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from fusedrl.compat.torch import hooks_of, is_compiled_function
from fusedrl.logs import warn_once
from fusedrl.models.comparison import Capabilities, compare_batch, compare_parts
from fusedrl.models.ranks import FROM_STATES, UNKNOWN, Step
from fusedrl.models.split import (
    Parts,
    autocast_of,
    compiler_of,
    device_of,
    fits,
    foreign_in,
    modules_of,
    parts_of,
    shared_below,
    vocabulary_of,
)

# Rounding may send a token to other experts, which looks as if sequences in a row mixed. They are
# said to do so if they do with the tokens from each of these ids.
FIRST_IDS = 0, 13
RATES = "drop", "jitter", "noise"  # in names of how much is random
KEPT = 8  # verdicts on a model that alternates between states, such as training and evaluation


# What was found of a model in the states that it has been in.
_verdicts: WeakKeyDictionary[nn.Module, list[tuple[Any, Capabilities]]] = WeakKeyDictionary()


def known_capabilities(model: Any, kwargs: Mapping[str, Any] | None = None) -> Capabilities | None:
    """What is known of a model, without a forward pass of it; ``None`` if it has to be compared."""
    parts = parts_of(model)
    parts = parts if fits(parts) is None else None
    now = _state(model, parts, kwargs or {})
    found = next((verdict for then, verdict in _verdicts.get(model, ()) if then == now), None)
    return None if found is None else _allowed(model, parts, found)


def capabilities_of(
    model: Any,
    known_ids: int = 1,
    kwargs: Mapping[str, Any] | None = None,
    step: Step | None = None,
) -> Capabilities:
    """What is known of a model, or what a comparison with its own logits shows; log why it is slow.

    Ids in ``[0, known_ids)`` are used if the model does not say its vocabulary, and ``kwargs``
    where its logits are needed. In a ``step`` all ranks of the model compare, whatever each knows,
    and agree on a way. An encoder, whose tokens see later ones, is a ``TypeError``.
    """
    known = known_capabilities(model, kwargs) if step is None else None
    if known is not None:
        return known
    parts = parts_of(model)
    why = fits(parts)
    parts = parts if why is None else None
    now = _state(model, parts, kwargs or {})
    step = step or Step(None)
    whole, _ = step.agree(ways=UNKNOWN if parts is None else FROM_STATES)
    if whole or parts is None:
        ids = vocabulary_of(model) or known_ids
        verdict = compare_batch(model, device_of(model), ids, kwargs or {})
    else:
        verdict = _compared_parts(parts, step)
    for reason in (why, verdict.why):
        if reason is not None:
            name = type(model).__name__
            warn_once(f"{name}: {reason}; its log-probs are computed from all its logits")
    if verdict.telling:
        _verdicts[model] = [(now, verdict), *_verdicts.get(model, ())][:KEPT]
    return _allowed(model, parts, verdict)


def _allowed(model: Any, parts: Parts | None, verdict: Capabilities) -> Capabilities:
    below = shared_below(getattr(parts.base if parts else model, "config", None))
    taken = verdict.together and verdict.splits
    return verdict._replace(parts=parts if taken else None, below=below)


def _state(model: nn.Module, parts: Parts | None, kwargs: Mapping[str, Any]) -> list[Any]:
    """What must be as it was for a verdict to hold, none of it kept alive.

    These are the modules of a model, their types, forwards, modes and hooks, the configuration and
    autocast. What has to hold of the model around its decoder is looked at in each call, and the
    values of weights do not matter.
    """
    device = parts.weight.device if parts else device_of(model)
    config = _copied(getattr(parts.base if parts else model, "config", None))
    found: list[Any] = [config, parts and (parts.scale,), autocast_of(device), sorted(kwargs)]
    modules = modules_of(model)
    kinds = dict.fromkeys(map(type, modules))
    found += [ref(call) for kind in kinds for call in (kind.forward, kind.__call__)]
    found += map(ref, modules)
    for module in modules:
        known, (before, behind) = vars(module), hooks_of(module)
        own = known.get("forward")
        kind = ref(type(module)), own and ref(own), known.get("is_causal")
        found.append((*kind, module.training, *before, *behind))
    return found


def _copied(value: Any) -> Any:
    """A copy of settings to compare with."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_copied, value))
    return _copied(vars(value)) if hasattr(value, "model_type") else value


def _compared_parts(parts: Parts, step: Step) -> Capabilities:
    """A verdict that all ranks share."""
    stranger = foreign_in(parts.decoder)
    strange, _ = step.agree(ways=FROM_STATES if stranger is None else UNKNOWN)
    if strange:  # weights that are 0 at first would hide what it does
        return Capabilities(
            f"{stranger or 'a forward or a hook on another rank'} is not its library's"
        )
    verdict = Capabilities("its numbers differ on another rank")
    for first in FIRST_IDS:
        try:
            found = compare_parts(parts, first)
        except Exception as error:  # which may not happen again
            found = Capabilities(f"trying it raised {error!r}", telling=False)
        differs, _ = step.agree(ways=FROM_STATES if found.why is None else UNKNOWN)
        if not differs:
            return found
        verdict = found if found.why else verdict
    return verdict


def may_share(parts: Parts) -> bool:
    """Whether a model that can share beginnings may do so now, which no verdict knows.

    Dropout would be drawn once for all sequences, and a compiled decoder be compiled once more for
    each tree.
    """
    return parts.decode is parts.decoder and not any(
        is_compiled_function(module.forward)
        or compiler_of(module) is not None
        or (module.training and _drops(module))
        for module in modules_of(parts.model)
    )


def _drops(module: nn.Module) -> bool:
    """Whether a module in training changes values at random, as far as its names tell."""
    kinds = " ".join(kind.__name__ for kind in type(module).__mro__)
    rates = [(kinds + name, x) for name, x in vars(module).items()]
    rates += getattr(getattr(module, "config", None), "__dict__", {}).items()
    return any(
        type(x) in (int, float) and x > 0 and any(word in name.lower() for word in RATES)
        for name, x in rates
    )
