"""Makes objects with locks usable in forked children."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

# A WeakKeyDictionary would run Python code when an owner is freed, and lose an interrupt in it.
_OWNERS: dict[weakref.ref[Any], dict[str, Callable[[], Any]]] = {}


def renew_in_children(owner: Any, **attributes: Callable[[], Any]) -> None:
    """Give ``owner`` new locks in every forked child.

    A lock that another thread of the parent held at the fork is never released in the child, where
    that thread does not exist. A ``with`` block that is running at the fork releases the old lock.

    Args:
        owner: the object with the locks; it is not kept alive.
        attributes: the names of the locks, each with what makes a new one, such as
            ``threading.Lock``.
    """
    for gone in [reference for reference in list(_OWNERS) if reference() is None]:
        _OWNERS.pop(gone, None)
    _OWNERS[weakref.ref(owner)] = attributes


def _renew() -> None:
    for reference, attributes in list(_OWNERS.items()):
        owner = reference()
        for name, make in attributes.items() if owner is not None else ():
            setattr(owner, name, make())


os.register_at_fork(after_in_child=_renew)
