"""Makes objects with locks usable in forked children."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_OWNERS: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renew_in_children(owner: Any, **attributes: Callable[[], Any]) -> None:
    """Give ``owner`` new locks in every forked child.

    A lock that another thread of the parent held at the fork is never released in the child, where
    that thread does not exist. A ``with`` block that is running at the fork releases the old lock.

    Args:
        owner: the object with the locks; it is not kept alive.
        attributes: the names of the locks, each with what makes a new one, such as
            ``threading.Lock``.
    """
    _OWNERS[owner] = attributes


class ComputedOnce(Generic[T]):
    """``functools.cached_property`` without the lock that it has up to Python 3.11.

    All instances share that lock, so that a child whose parent held it at the fork waits for ever.
    Without a lock, threads that come at the same time each compute the value.

    Args:
        compute: computes the value from an object with a ``__dict__``.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the name under which objects keep the value, where it is found before this."""
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        """Compute the value, when it is first asked for."""
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def _renew() -> None:
    for owner, attributes in list(_OWNERS.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
