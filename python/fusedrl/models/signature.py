"""What of a model must stay as it was for what a trial found out about it to hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ref

from torch import nn
from torch.nn.modules import module as every_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What is computed in another way while it is set: the compiled call of a module, and adapters.
_SWITCHES = ("_compiled_call_impl", "_disable_adapters", "_active_adapter", "merged_adapters")


def signature(model: nn.Module, ends: Iterable[nn.Module], *settings: Any) -> Any:
    """A value that changes with whatever decides how a model's log-probs may be computed.

    That is, for each module: its identity, class and forward (replaced on the class or on the
    instance), mode, adapters, and the dtypes and devices of its parameters; the configuration; the
    simple attributes of ``ends``, which are the model, its decoder and its head; and ``settings``.
    The values of weights are no part of it, nor are functions that a forward calls by name, nor
    hooks: those inside of the decoder run in every way, and no way passes others by.
    """
    return (
        tuple(map(_module, model.modules())),
        _frozen(getattr(model, "config", None)),
        tuple(map(_attributes, ends)),
        _frozen(settings),
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether there are hooks that calling something else than the module would pass by."""
    of_all = any(getattr(every_module, f"_global{name}") for name in _HOOKS)
    own = any(getattr(module, name) for name in _HOOKS)
    return of_all or own or hasattr(module, "_hf_hook")


class _Same:
    """Equal for one object only, without keeping it alive; an address alone is used again."""

    __slots__ = ("_ref",)

    def __init__(self, value: Any) -> None:
        try:
            self._ref: Any = ref(value)  # one and the same while the object lives
        except TypeError:
            self._ref = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ref is other._ref

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _module(module: nn.Module) -> Any:
    state, kind = vars(module), type(module)
    return (
        _Same(module),
        _Same(kind),
        _Same(kind.__call__),
        _Same(state.get("forward", kind.forward)),
        module.training,
        tuple(_frozen(state[name]) for name in _SWITCHES if name in state),
        tuple((p.dtype, p.device) for p in state["_parameters"].values() if p is not None),
    )


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
    return _frozen(vars(value)) if hasattr(value, "model_type") else _Same(value)
