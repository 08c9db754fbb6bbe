"""What must be unchanged in a model for the verdict of its comparison to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import ref

from torch import nn

from fusedrl.compat.accelerate import has_hook
from fusedrl.compat.peft import ADAPTER_SWITCHES
from fusedrl.compat.torch import COMPILED_CALL, children_of, has_hooks, parameters_of

# What a module computes in another way: a forward of its own, its compiled call, and adapters.
_SWITCHES = ("forward", COMPILED_CALL, *ADAPTER_SWITCHES, "merged_adapters")


def signature(modules: Sequence[nn.Module], ends: Iterable[nn.Module], *settings: Any) -> Any:
    """A value that changes when the way in which a model's log-probs may be computed can change.

    It leaves out the values of weights, functions that a forward calls by name, and hooks: those
    inside of the decoder run in every way, and others are looked for at each call.

    Args:
        modules: the model and all in it. Their identities, classes, forwards, modes and adapters
            count, dtypes and devices of their parameters, and the configuration of the first.
        ends: modules whose plain attributes count: the model, its decoder and its head.
        settings: further values that count.
    """
    found: list[Any] = []
    for module in modules:
        state = vars(module)
        found.append(module.training)
        found += [(name, _frozen(state[name])) for name in _SWITCHES if name in state]
        weights = parameters_of(module)
        found.append(len(weights))
        for weight in weights.values():
            if weight is not None:
                found += (weight.dtype, weight.device)
    kinds = list(map(type, modules))
    called = [
        function for kind in dict.fromkeys(kinds) for function in (kind.__call__, kind.forward)
    ]
    simple = (bool, int, float, str, type(None))
    attributes = [(n, x) for end in ends for n, x in vars(end).items() if isinstance(x, simple)]
    config = getattr(modules[0], "config", None)
    same = _Same([*modules, *kinds]), _Same(called)
    return same, found, attributes, _frozen(config), _frozen(settings)


def modules_of(model: nn.Module, without: Sequence[Any] = ()) -> list[nn.Module]:
    """A model and all modules in it, each once, several times as fast as ``model.modules()``.

    It leaves out the modules ``without``, and those in them.
    """
    found = {model: None}
    pending = [model]
    while pending:
        for module in children_of(pending.pop()).values():
            if module is not None and module not in found and module not in without:
                found[module] = None
                pending.append(module)
    return list(found)


def is_hooked(module: nn.Module) -> bool:
    """Whether the module has hooks, which would not run if a part of it were called instead.

    Hooks of the backward pass count only if a backward pass may follow.
    """
    return has_hooks(module) or has_hook(module)


class _Same:
    """Compares objects by identity without keeping them alive; an address may be used again."""

    def __init__(self, values: Sequence[Any]) -> None:
        try:
            self._refs: list[Any] = list(map(ref, values))  # an object has one while it lives
        except TypeError:
            self._refs = list(values)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same) or len(self._refs) != len(other._refs):
            return False
        return all(map(is_, self._refs, other._refs))

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _frozen(value: Any) -> Any:
    """A copy of settings to compare with; only containers and plain values are copied."""
    if isinstance(value, Mapping):
        return [(key, _frozen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return list(map(_frozen, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _frozen(vars(value)) if hasattr(value, "model_type") else _Same([value])
