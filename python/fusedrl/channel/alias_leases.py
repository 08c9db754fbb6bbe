"""Keeps a lease for as long as a parameter lies in the memory that it protects."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusedrl.channel.forking import renew_in_children


@dataclass(slots=True, eq=False)
class _Held:
    """A lease, the storage that it protects, and how many parameters lie there."""

    release: Callable[[], None]
    storage: int
    left: int

    def less(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.release()


@dataclass(slots=True, eq=False)
class _Place:
    parameter: weakref.ref[Tensor]
    held: _Held


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

    def hold(self, parameters: Sequence[Tensor], release: Callable[[], None]) -> None:
        """Note that ``parameters`` lie in the memory of a lease.

        Args:
            parameters: all parameters of one load.
            release: called when none of them lies there any more.
        """
        storage = parameters[0].untyped_storage()._cdata if parameters else 0
        with self._lock:
            held = _Held(release, storage, len(parameters) + 1)
            for parameter in parameters:
                key = id(parameter)
                place = self._places.get(key)
                if place is None:
                    self._places[key] = _Place(weakref.ref(parameter, self._gone(key)), held)
                else:
                    before, place.held = place.held, held
                    before.less()
            if self._places:
                _IN_USE.add(self)
            held.less()

    def forget(self, parameters: Sequence[Tensor]) -> None:
        """Note that ``parameters`` have memory of their own by now."""
        with self._lock:
            for parameter in parameters:
                self._drop(id(parameter))

    def close(self) -> None:
        """Copy the parameters into memory of their own, and end all leases."""
        with self._lock:
            for key, place in list(self._places.items()):
                parameter, storage = place.parameter(), place.held.storage
                if parameter is not None and parameter.untyped_storage()._cdata == storage:
                    parameter.data = parameter.data.clone()
                self._drop(key)

    def _drop(self, key: int) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            place.held.less()
        if not self._places:
            _IN_USE.discard(self)

    def _gone(self, key: int) -> Callable[[weakref.ref[Tensor]], None]:
        def gone(ref: weakref.ref[Tensor]) -> None:
            with self._lock:
                place = self._places.get(key)
                if place is not None and place.parameter is ref:
                    self._drop(key)

        return gone
