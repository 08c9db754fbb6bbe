"""Keeps a lease for as long as a parameter lies in the memory that it protects."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fusedrl.channel.forking import renew_in_children


class _Place(NamedTuple):
    """A parameter, the storage in which it lies, and what holds that."""

    parameter: weakref.ref[Tensor]
    storage: int
    lease: Any


# Instances with parameters, so that their readers stay open without any other reference to them.
_IN_USE: set[AliasLeases] = set()


class AliasLeases:
    """Keeps leases until no parameter lies in their memory.

    It goes by parameters and not by modules, because a wrapper may be freed while the module in it
    is still in use.
    """

    def __init__(self) -> None:
        # Re-entrant: parameters may be garbage-collected anywhere, also while the lock is held.
        self._lock = threading.RLock()
        renew_in_children(self, _lock=threading.RLock)
        self._places: dict[int, _Place] = {}

    def hold(self, parameters: Sequence[Tensor], lease: Any) -> None:
        """Note that ``parameters`` lie in the memory of a lease.

        Args:
            parameters: all parameters of one load.
            lease: is dropped, and so released, when none of them lies there any more.
        """
        storage = parameters[0].untyped_storage()._cdata if parameters else 0
        with self._lock:
            for parameter in parameters:
                key = id(parameter)
                known = self._places.get(key)
                held = weakref.ref(parameter, self._gone(key)) if known is None else known.parameter
                self._places[key] = _Place(held, storage, lease)
            if self._places:
                _IN_USE.add(self)

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """Note that ``parameters`` have memory of their own by now."""
        with self._lock:
            for parameter in parameters:
                self._drop(id(parameter))

    def close(self) -> None:
        """Copy the parameters into memory of their own, and end all leases."""
        with self._lock:
            for key, place in list(self._places.items()):
                parameter = place.parameter()
                if parameter is not None and parameter.untyped_storage()._cdata == place.storage:
                    parameter.data = parameter.data.clone()
                self._drop(key)

    def _drop(self, key: int) -> None:
        self._places.pop(key, None)
        if not self._places:
            _IN_USE.discard(self)

    def _gone(self, key: int) -> Callable[[weakref.ref[Tensor]], None]:
        def gone(ref: weakref.ref[Tensor]) -> None:
            with self._lock:
                place = self._places.get(key)
                if place is not None and place.parameter is ref:
                    self._drop(key)

        return gone
