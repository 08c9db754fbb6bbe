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

from fusedrl.compat.torch import COMPILED_CALL, hooks_of
from fusedrl.logs import warn_once
from fusedrl.models.comparison import Capabilities, compare_batch, compare_parts
from fusedrl.models.ranks import ALONE, Step
from fusedrl.models.split import (
    Parts,
    autocast_of,
    device_of,
    fits,
    foreign_in,
    modules_of,
    parts_of,
    shared_below,
)

# Rounding may send a token to other experts, which looks as if sequences in a row mixed. They are
# said to do so if they do with the tokens from each of these ids.
FIRST_IDS = 0, 13
RATES = "p", "jitter_noise"  # of how much is random, beside names with "drop"
KEPT = 8  # verdicts on a model that alternates between states, such as training and evaluation

# What was found of a model in the states that it has been in.
_verdicts: WeakKeyDictionary[nn.Module, list[tuple[Any, Capabilities]]] = WeakKeyDictionary()


def capabilities_of(
    model: Any, kwargs: Mapping[str, Any] | None = None, step: Step = ALONE
) -> Capabilities:
    """What is known of a model, or what a comparison with its own logits shows; log why it is slow.

    Its forward gets ``kwargs`` where its logits are needed. The ranks of a ``step`` agree on a way:
    where one does not know the model, or knows it otherwise, all compare. An encoder, whose tokens
    see later ones, is a ``TypeError``.
    """
    parts = parts_of(model)
    why = fits(parts)
    parts = parts if why is None else None
    config = getattr(parts.base if parts else model, "config", None)
    now = _state(model, parts, config, kwargs or {})
    verdict = next((known for then, known in _verdicts.get(model, ()) if then == now), None)
    ways = (True, True) if verdict is None else (verdict.splits, not verdict.splits)
    if all(step.largest(*ways)) or verdict is None:
        with step.collective():
            verdict = _verdict_on(model, parts, kwargs or {}, step)
        verdict = verdict._replace(below=shared_below(config))
        for reason in (why, verdict.why):
            if reason is not None:
                name = type(model).__name__
                warn_once(f"{name}: {reason}; its log-probs are computed from all its logits")
        if verdict.telling:
            _verdicts[model] = [(now, verdict), *_verdicts.get(model, ())][:KEPT]
    return verdict._replace(parts=parts if verdict.splits else None)


def _state(
    model: nn.Module, parts: Parts | None, config: Any, kwargs: Mapping[str, Any]
) -> list[Any]:
    """What must be as it was for a verdict to hold, none of it kept alive.

    These are the modules of a model, their types, forwards, modes, hooks and rates of dropout, what
    is compiled, which adapters are on, the configuration and autocast. What has to hold of the
    model around its decoder is looked at in each call, and the values of weights do not matter.
    """
    autocast = autocast_of(parts.weight.device if parts else device_of(model))
    found: list[Any] = [_copied(config), parts and (parts.scale,), autocast, sorted(kwargs)]
    modules = modules_of(model)
    kinds = dict.fromkeys(map(type, modules))
    adapted = [kind for kind in kinds if hasattr(kind, "merged_adapters")]  # peft's layers
    found += [ref(call) for kind in kinds for call in (kind.forward, kind.__call__)]
    found += map(ref, modules)
    for module in modules:
        known, (before, behind) = vars(module), hooks_of(module)
        own = known.get("forward")
        kind = ref(type(module)), own and ref(own), known.get("is_causal")
        named = [known[x] for x in known if x in RATES or "drop" in x] if module.training else ()
        rates = [x for x in named if type(x) in (int, float)]
        compiled = known.get(COMPILED_CALL) is not None
        found.append((*kind, module.training, rates, compiled, *before, *behind))
        if type(module) in adapted:
            layer: Any = module
            adapters = layer.active_adapters, layer.merged_adapters
            found.append((layer.disable_adapters, *map(tuple, adapters)))
    return found


def _copied(value: Any) -> Any:
    """A copy of settings to compare with."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_copied, value))
    return _copied(vars(value)) if hasattr(value, "model_type") else value


def _verdict_on(
    model: Any, parts: Parts | None, kwargs: Mapping[str, Any], step: Step
) -> Capabilities:
    """A verdict that all ranks share."""
    stranger = None if parts is None else foreign_in(parts.decoder)
    whole, strange = step.largest(parts is None, stranger is not None)
    if whole or parts is None:
        return compare_batch(model, kwargs)
    if strange:  # weights that are 0 at first would hide what it does
        stranger = stranger or "a forward or a hook on another rank"
        return Capabilities(f"{stranger} is not its library's")
    verdict = Capabilities("its numbers differ on another rank")
    for first in FIRST_IDS:
        try:
            found = compare_parts(parts, first)
        except Exception as error:  # which may not happen again
            found = Capabilities(f"trying it raised {error!r}", telling=False)
        (differs,) = step.largest(found.why is not None)
        if not differs:
            return found
        verdict = found if found.why else verdict
    return verdict
