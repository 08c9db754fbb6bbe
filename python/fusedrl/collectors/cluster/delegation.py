"""Attributes of a collector that one of its parts, or its actors, answer for."""

from __future__ import annotations

from typing import Any

from torchrl.collectors._single import _CollectorMeta


class OwnArguments(_CollectorMeta):
    """A metaclass that passes all arguments on; torchrl's takes ``num_collectors`` for itself."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance, with all arguments."""
        return type.__call__(cls, *args, **kwargs)


def of_part(part: str, name: str, doc: str) -> Any:
    """An attribute that reads and sets an attribute of a part of the collector.

    Args:
        part: the collector's attribute with the part.
        name: the name of the part's attribute.
        doc: the docstring of the attribute.
    """

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


def in_actors(name: str, doc: str) -> Any:
    """An attribute that is read from the first actor's collector, and set in those of all."""

    def read(self: Any) -> Any:
        return self._actors.one(0, "get", name)

    def write(self: Any, value: Any) -> None:
        self._actors.each("set", name, value)

    return property(read, write, doc=doc)
