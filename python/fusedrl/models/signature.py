"""What must be unchanged in a model for the results of its probes to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import ref

from torch import nn

from fusedrl.compat.accelerate import has_hook
from fusedrl.compat.peft import ADAPTER_SWITCHES
from fusedrl.compat.torch import COMPILED_CALL, children_of, has_hooks, parameters_of

# What is computed in another way while it is set: the compiled call of a module, and adapters.
_SWITCHES = (COMPILED_CALL, *ADAPTER_SWITCHES, "merged_adapters")


def signature(modules: Sequence[nn.Module], ends: Iterable[nn.Module], *settings: Any) -> Any:
    """A value that changes when the way in which a model's log-probs may be computed can change.

    It has, for each module: identity, class, forward (replaced on the class or on the instance),
    mode, adapters, and the dtypes and devices of the parameters. It also has the configuration, the
    simple attributes of ``ends`` (the model, its decoder and its head), and ``settings``.

    It does not have the values of weights, nor functions that a forward calls by name. Hooks are
    left out too: those inside of the decoder run in every way, and others are looked for at each
    call.

    Args:
        modules: the model and all modules in it, from :func:`modules_of`.
        ends: the modules whose attributes count.
        settings: further values that count.
    """
    return (
        _Same(modules),
        _kinds(modules),
        [module.training for module in modules],
        _exceptions(modules),
        _weights(modules),
        _frozen(getattr(modules[0], "config", None)),
        tuple(map(_attributes, ends)),
        _frozen(settings),
    )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """A model and all modules in it, each once, several times as fast as ``model.modules()``."""
    found = {model: None}
    pending = [model]
    while pending:
        for module in children_of(pending.pop()).values():
            if module is not None and module not in found:
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

    __slots__ = ("_refs",)

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


def _kinds(modules: Sequence[nn.Module]) -> Any:
    """The class of each module, and what each class does when it is called."""
    kinds = list(map(type, modules))
    each = list(dict.fromkeys(kinds))
    called = [function for kind in each for function in (kind.__call__, kind.forward)]
    return _Same(kinds), _Same(called)


def _exceptions(modules: Sequence[nn.Module]) -> Any:
    """The forwards and switches that modules have on the instance, and which modules these are."""
    found: list[Any] = []
    for place, module in enumerate(modules):
        state = vars(module)
        if "forward" in state:
            found.append((place, _Same([state["forward"]])))
        for name in _SWITCHES:
            if name in state:
                found.append((place, name, _frozen(state[name])))
    return found


def _weights(modules: Sequence[nn.Module]) -> list[Any]:
    """How many parameters each module has, and their dtypes and devices, in one list."""
    found: list[Any] = []
    for module in modules:
        parameters = parameters_of(module)
        found.append(len(parameters))
        for parameter in parameters.values():
            if parameter is not None:
                found += (parameter.dtype, parameter.device)
    return found


def _attributes(module: nn.Module) -> Any:
    simple = (bool, int, float, str, type(None))
    return tuple((name, x) for name, x in vars(module).items() if isinstance(x, simple))


def _frozen(value: Any) -> Any:
    """A copy of settings to compare with; only containers and plain values are copied."""
    if isinstance(value, Mapping):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _frozen(vars(value)) if hasattr(value, "model_type") else _Same([value])
