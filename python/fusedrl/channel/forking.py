"""Locks of a process that forks."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

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


def _renew() -> None:
    for owner, attributes in list(_OWNERS.items()):
        for name, make in attributes.items():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
