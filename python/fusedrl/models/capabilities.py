"""Which fast paths a model allows: a list of tested types, and one comparison with its logits.

A model may compute more than its decoder and head, mix the sequences packed into a row, or depend
on padding or the length of a call: the log-probs would look plausible and be wrong. So only tested
types are split into decoder and head (``split.py``), and only if the results agree with the model's
logits at the first use. All others take the slow path, which is right for every model.
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

# Rounding may route a token to other experts, which looks as if sequences in a row mixed. So a
# failed comparison is repeated with other tokens: it starts from each of these ids.
FIRST_IDS = 0, 13
RATES = "p", "jitter_noise"  # attributes with rates of noise, in addition to names with "drop"
KEPT = 8  # results per model, as it may alternate between states such as training and evaluation

# The capabilities of each model in its latest states.
_found: WeakKeyDictionary[nn.Module, list[tuple[Any, Capabilities]]] = WeakKeyDictionary()


def capabilities_of(
    model: Any, kwargs: Mapping[str, Any] | None = None, step: Step = ALONE
) -> Capabilities:
    """The cached or newly compared capabilities of a model; logs the reason for a slow path.

    Its forward gets ``kwargs`` if its logits are needed. All ranks of a ``step`` compare unless all
    have the same cached result. An encoder, whose tokens attend to later ones, is a ``TypeError``.
    """
    parts = parts_of(model)
    why = fits(parts)
    parts = parts if why is None else None
    config = getattr(parts.base if parts else model, "config", None)
    now = _state(model, parts, config, kwargs or {})
    found = next((known for then, known in _found.get(model, ()) if then == now), None)
    paths = (True, True) if found is None else (found.splits, not found.splits)
    if all(step.largest(*paths)) or found is None:
        with step.collective():
            found = _compared(model, parts, kwargs or {}, step)
        found = found._replace(below=shared_below(config))
        for reason in (why, found.why):
            if reason is not None:
                name = type(model).__name__
                warn_once(f"{name}: {reason}; its log-probs are computed from its full logits")
        if found.conclusive:
            _found[model] = [(now, found), *_found.get(model, ())][:KEPT]
    return found._replace(parts=parts if found.splits else None)


def _state(
    model: nn.Module, parts: Parts | None, config: Any, kwargs: Mapping[str, Any]
) -> list[Any]:
    """The state of a model that a cached result depends on, with only weak references to it.

    It consists of the modules, their types, forwards, modes, hooks, dropout rates and compilation,
    the active adapters, the configuration and autocast. The wrappers around the decoder are checked
    in each call by :func:`fits`; the values of weights do not matter.
    """
    autocast = autocast_of(parts.weight.device if parts else device_of(model))
    state: list[Any] = [_copied(config), parts and (parts.scale,), autocast, sorted(kwargs)]
    modules = modules_of(model)
    kinds = dict.fromkeys(map(type, modules))
    adapted = [kind for kind in kinds if hasattr(kind, "merged_adapters")]  # peft's layers
    state += [ref(call) for kind in kinds for call in (kind.forward, kind.__call__)]
    state += map(ref, modules)
    for module in modules:
        attrs, (pre_hooks, hooks) = vars(module), hooks_of(module)
        forward = attrs.get("forward")
        kind = ref(type(module)), forward and ref(forward), attrs.get("is_causal")
        named = [attrs[x] for x in attrs if x in RATES or "drop" in x] if module.training else ()
        rates = [x for x in named if type(x) in (int, float)]
        compiled = attrs.get(COMPILED_CALL) is not None
        state.append((*kind, module.training, rates, compiled, *pre_hooks, *hooks))
        if type(module) in adapted:
            layer: Any = module
            adapters = layer.active_adapters, layer.merged_adapters
            state.append((layer.disable_adapters, *map(tuple, adapters)))
    return state


def _copied(value: Any) -> Any:
    """A copy of configuration values, for a later comparison."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(_copied, value))
    return _copied(vars(value)) if hasattr(value, "model_type") else value


def _compared(
    model: Any, parts: Parts | None, kwargs: Mapping[str, Any], step: Step
) -> Capabilities:
    """The result of a comparison, the same on all ranks."""
    foreign = None if parts is None else foreign_in(parts.decoder)
    unsplit, any_foreign = step.largest(parts is None, foreign is not None)
    if unsplit or parts is None:
        return compare_batch(model, kwargs)
    if any_foreign:  # not compared: weights that are 0 at first could hide its effect
        foreign = foreign or "a forward or a hook on another rank"
        return Capabilities(f"{foreign} is not defined by its library")
    failed = Capabilities("its decoder and head do not compute its logits on another rank")
    for first in FIRST_IDS:
        try:
            found = compare_parts(parts, first)
        except Exception as error:  # which may not recur
            found = Capabilities(f"a trial forward pass raised {error!r}", conclusive=False)
        (differs,) = step.largest(found.why is not None)
        if not differs:
            return found
        failed = found if found.why else failed
    return failed
