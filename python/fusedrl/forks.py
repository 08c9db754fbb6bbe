"""Locks in a process that was forked while another thread held them."""

from __future__ import annotations

import os
import weakref
from typing import Any, TypeVar

L = TypeVar("L")

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def free_in_children(lock: L) -> L:
    """A ``threading.Lock`` or ``RLock``, which is free in every process that is forked later.

    The thread that held it does not exist there, and would never release it.
    """
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()


os.register_at_fork(after_in_child=_free_all)
