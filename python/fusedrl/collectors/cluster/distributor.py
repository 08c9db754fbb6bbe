"""Updates on their way to the actors of a collector: one number each, one after the other."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from fusedrl.collectors.cluster.actors import UPDATES, Actors
from fusedrl.collectors.interrupts import uninterrupted


class Distributor:
    """Numbers what is sent to the actors, and sends it to all of them in one order.

    It lives beside the collector; once handles of the collector are elsewhere, in the first actor,
    where every process asks for it.

    Args:
        actors: of the collector.
        versions: the tracker that counts, a :class:`PolicyVersion`.
    """

    def __init__(self, actors: Actors, versions: Any) -> None:
        self.actors, self.versions = actors, versions
        self._stored: str | None = None  # the object of Ray's store that has the newest version
        self._updating = threading.RLock()  # held until an update is everywhere

    def __getstate__(self) -> dict[str, Any]:
        """Without the lock, which nobody holds while the distributor moves."""
        return {name: value for name, value in vars(self).items() if name != "_updating"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """With a lock of its own."""
        vars(self).update(state, _updating=threading.RLock())

    @property
    def lock(self) -> Any:
        """Held while an update is on its way."""
        return self._updating

    def version(self) -> Any:
        """The newest version."""
        return self.versions.version

    def publish(self, stored: Sequence[Any]) -> None:
        """Let each actor publish the weights of a reference, which comes in a list."""
        self._to_all("update_policy_weights_", stored[0], between=False)

    def update(self, stored: Sequence[Any], worker_ids: Any) -> None:
        """Let the updater in each actor take the weights of a reference, which comes in a list."""
        self._to_all("update_by_updater", stored[0], worker_ids, between=True)

    def count(self) -> None:
        """A version of the weights that there are."""
        with self._updating:
            with uninterrupted():
                self.versions.increment_version()
                version = self.versions.version
                answers = self.actors.ask_all("renumber", version, between=False)
            self.actors.wait(answers, self.actors.timeout)

    def send(self, stored: Sequence[Any], index: int) -> Any:
        """Weights of a reference for one actor: a reference to its answer."""
        with self._updating:
            version = self._number(stored[0])
            return self.actors.send(
                index, "update_policy_weights_", stored[0], version, between=False
            )

    def send_and_wait(self, stored: Sequence[Any], index: int) -> None:
        """As :meth:`send`, with the actor's answer."""
        self.actors.answer(self.send(stored, index), index)

    def load(self, version: Any, follows: bool) -> None:
        """The version of a state, unless policies that follow a channel keep what was sent."""
        with self._updating:
            if self._stored is None or not follows:
                self.versions.version = version

    def _number(self, reference: Any) -> Any:
        """The version of what is stored: a new one for each object."""
        if reference.hex() != self._stored:
            self._stored = reference.hex()
            self.versions.increment_version()
        return self.versions.version

    def _to_all(self, method: str, reference: Any, *args: Any, between: bool) -> None:
        """Send it under one version, which is taken back where every actor refuses it."""
        with self._updating:
            before = (self._stored, self.versions.version)
            with uninterrupted():
                version = self._number(reference)
                answers = self.actors.ask_all(method, reference, *args, version, between=between)
            failures, refused = self.actors.failures(
                answers, None if between else self.actors.timeout
            )
            if refused and version != before[1]:
                self._stored, self.versions.version = before
            if failures:
                raise failures[0]


class InFirstActor:
    """The distributor of a collector that has handles in several processes.

    Args:
        actors: of the collector.
        versions: the tracker of this process, which is told what it counts there.
    """

    def __init__(self, actors: Actors, versions: Any) -> None:
        self.actors, self.versions = actors, versions
        self.lock = threading.RLock()

    def version(self) -> Any:
        """The newest version."""
        # Not in the group of updates: these may wait for batches.
        version = self.actors.wait(
            [self.actors.send(0, "version", between=False)], self.actors.timeout
        )[0]
        if version != self.versions.version:
            self.versions.version = version
        return version

    def publish(self, stored: Sequence[Any]) -> None:
        """As :meth:`Distributor.publish`."""
        self.actors.wait([self._ask("publish", stored)], self.actors.timeout)

    def update(self, stored: Sequence[Any], worker_ids: Any) -> None:
        """As :meth:`Distributor.update`."""
        self.actors.wait([self._ask("update", stored, worker_ids)], None)

    def count(self) -> None:
        """As :meth:`Distributor.count`."""
        self.actors.wait([self._ask("count")], self.actors.timeout)

    def send(self, stored: Sequence[Any], index: int) -> Any:
        """As :meth:`Distributor.send`."""
        return self._ask("send_and_wait", stored, index)

    def load(self, version: Any, follows: bool) -> None:
        """As :meth:`Distributor.load`."""
        self.actors.wait([self._ask("load", version, follows)], self.actors.timeout)

    def _ask(self, method: str, *args: Any) -> Any:
        return self.actors.send(0, "distribute", method, args, group=UPDATES)
