"""Locks of a process that forks, and what does without one."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_OWNERS: weakref.WeakKeyDictionary[Any, dict[str, Callable[[], Any]]] = weakref.WeakKeyDictionary()


def renew_in_children(owner: Any, **attributes: Callable[[], Any]) -> None:
    """Have forked children find new locks in ``owner``.

    A lock that another thread of the parent had at the fork is never released in the child, where
    that thread does not exist. Whoever is within such a lock keeps the object that was entered.

    Args:
        owner: has the attributes, for as long as it lives.
        attributes: their names, and what makes them, such as ``threading.Lock``.
    """
    _OWNERS[owner] = attributes


class ComputedOnce(Generic[T]):
    """``functools.cached_property`` without the lock that it has up to Python 3.11.

    That lock is one for all instances: a child whose parent had it at the fork waits for ever.
    Threads that come at the same time compute the same value.

    Args:
        compute: of an object with a ``__dict__``.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Where the value is kept, so that it is found before this."""
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> T:
        """The value, the first time."""
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


def _renew() -> None:
    for owner, attributes in list(_OWNERS.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
