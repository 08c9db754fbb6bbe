"""What must be unchanged in a model for the results of its probes to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.modules import module as every_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
# What is computed in another way while it is set: the compiled call of a module, and adapters.
_SWITCHES = ("_compiled_call_impl", "_disable_adapters", "_active_adapter", "merged_adapters")


def signature(modules: Sequence[nn.Module], ends: Iterable[nn.Module], *settings: Any) -> Any:
    """A value that changes with whatever decides how a model's log-probs may be computed.

    That is, for each module: its identity, class and forward (replaced on the class or on the
    instance), mode, adapters, and the dtypes and devices of its parameters; the configuration; the
    simple attributes of ``ends``, which are the model, its decoder and its head; and ``settings``.
    The values of weights are no part of it, nor are functions that a forward calls by name, nor
    hooks: those inside of the decoder run in every way, and no way passes others by.

    Args:
        modules: the model and what it consists of, as :func:`modules_of` has them.
        ends: the modules whose attributes count.
        settings: what else counts.
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
    """A model and all modules in it, each once; several times as quick as ``model.modules()``."""
    found = {model: None}
    pending = [model]
    while pending:
        for module in pending.pop()._modules.values():
            if module is not None and module not in found:
                found[module] = None
                pending.append(module)
    return list(found)


def is_hooked(module: nn.Module) -> bool:
    """Whether there are hooks that calling something else than the module would pass by.

    Those of the backward pass count where one may follow.
    """
    names = (*_HOOKS, *_BACKWARD_HOOKS) if torch.is_grad_enabled() else _HOOKS
    of_all = any(getattr(every_module, f"_global{name}") for name in names)
    own = any(getattr(module, name) for name in names)
    return of_all or own or hasattr(module, "_hf_hook")


class _Same:
    """Equal for the same objects only, without keeping them alive; addresses are used again."""

    __slots__ = ("_refs",)

    def __init__(self, values: Sequence[Any]) -> None:
        try:
            self._refs: list[Any] = list(map(ref, values))  # one and the same while an object lives
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
    """The forwards and switches of modules that have their own, and which these modules are."""
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
        parameters = module._parameters
        found.append(len(parameters))
        for parameter in parameters.values():
            if parameter is not None:
                found += (parameter.dtype, parameter.device)
    return found


def _attributes(module: nn.Module) -> Any:
    simple = (bool, int, float, str, type(None))
    return tuple((name, x) for name, x in vars(module).items() if isinstance(x, simple))


def _frozen(value: Any) -> Any:
    """A copy of settings to compare with; what is no container and no plain value is itself."""
    if isinstance(value, Mapping):
        return tuple((key, _frozen(item)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _frozen(vars(value)) if hasattr(value, "model_type") else _Same([value])
