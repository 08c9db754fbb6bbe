"""Attributes and methods of a collector that its actors answer for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torchrl.collectors.llm.ray_collector import RayLLMCollector as _RayLLMCollector

from fusedrl.collectors.cluster.ray_actors import Actors

_Meta: Any = type(_RayLLMCollector)


class OwnArguments(_Meta):
    """A metaclass that passes all arguments on; torchrl's takes ``num_collectors`` for itself."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore
        """Make an instance, with all arguments."""
        return type.__call__(cls, *args, **kwargs)


def in_actors(name: str, doc: str) -> Any:
    """An attribute that is read from the first actor's collector, and set in those of all."""

    def read(self: Any) -> Any:
        return self._actors.one(0, "get", name)

    def write(self: Any, value: Any) -> None:
        self._actors.each("set", name, value)

    return property(read, write, doc=doc)


class FirstActor:
    """The first actor, with those methods of its collector as remote methods that change nothing.

    Others would change this actor without the rest.
    """

    def __init__(self, actors: Actors) -> None:
        self._actors = actors

    def __getattr__(self, name: str) -> Any:
        """A method of the collector, whose ``remote`` calls it between two batches."""
        if name.startswith(("get", "is_")) or name in ("profile", "state_dict", "stats"):
            return SimpleNamespace(
                remote=lambda *args, **kwargs: self._actors.send(0, "call", name, args, kwargs)
            )
        raise AttributeError(
            f"{name}: expected a method that asks one collector, got one that is for all actors; "
            "call it on the RayLLMCollector"
        )
