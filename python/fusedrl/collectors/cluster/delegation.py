"""Attributes of a collector that one of its parts, or its actors, answer for."""

from __future__ import annotations

from typing import Any

from torchrl.collectors._single import _CollectorMeta


class OwnArguments(_CollectorMeta):
    """torchrl's keeps ``num_collectors`` for ``Collector`` alone."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one, with all that is given."""
        return type.__call__(cls, *args, **kwargs)


def of_part(part: str, name: str, doc: str) -> Any:
    """An attribute that is one of a part of the collector.

    Args:
        part: the collector's attribute that has the part.
        name: of the part's attribute.
        doc: what it is.
    """

    def read(self: Any) -> Any:
        return getattr(getattr(self, part), name)

    def write(self: Any, value: Any) -> None:
        setattr(getattr(self, part), name, value)

    return property(read, write, doc=doc)


def in_actors(name: str, doc: str) -> Any:
    """An attribute of the actors' collectors, of that name: read from the first, set in all."""

    def read(self: Any) -> Any:
        return self._actors.one(0, "get", name)

    def write(self: Any, value: Any) -> None:
        self._actors.each("set", name, value)

    return property(read, write, doc=doc)
