"""Gives each update of a collector's actors one number, and sends updates one after the other."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from fusedrl.channel.forking import renew_in_children
from fusedrl.collectors.cluster.ray_actors import UPDATES, Actors
from fusedrl.collectors.interrupts import uninterrupted


@dataclass(frozen=True)
class Stored:
    """A reference to weights in Ray's store, in a wrapper that keeps Ray from fetching them."""

    reference: Any


class Distributor:
    """Numbers the updates for the actors, and sends them to all actors in the same order.

    It runs in the collector's process. Once other processes have handles of the collector, it runs
    in the first actor, which all of them call.

    Args:
        actors: the actors of the collector.
        versions: the tracker that counts, a :class:`PolicyVersion`.
        newest: the id of the object in Ray's store that has the newest version.

    Attributes:
        lock: held while an update is sent.
    """

    def __init__(self, actors: Actors, versions: Any, newest: str | None = None) -> None:
        self.lock: Any = threading.RLock()
        renew_in_children(self, lock=threading.RLock)
        self._actors, self._versions, self._newest = actors, versions, newest

    def to_first_actor(self) -> InFirstActor:
        """Let the first actor number updates from here on; returns the object that calls it."""
        told = self._actors.share(), self._versions, self._newest
        asked = self._actors.send(0, "take_over", *told, between=False)
        self._actors.wait([asked], self._actors.timeout)
        return InFirstActor(self._actors, self._versions)

    def version(self) -> Any:
        """The newest version."""
        return self._versions.version

    def publish(self, stored: Stored) -> None:
        """Let every actor publish weights."""
        self._to_all("update_policy_weights_", stored, between=False)

    def update(self, stored: Stored, worker_ids: Any) -> None:
        """Let the updater in every actor take weights."""
        self._to_all("update_by_updater", stored, worker_ids, between=True)

    def count(self) -> None:
        """Count a version without new weights."""
        with self.lock:
            with uninterrupted():
                self._versions.increment_version()
                version = self._versions.version
                answers = self._actors.ask_all("renumber", version, between=False)
            self._actors.wait(answers, self._actors.timeout)

    def send(self, stored: Stored, index: int) -> Any:
        """Send weights to one actor, and return a reference to its answer."""
        with self.lock:
            version = self._number(stored)
            return self._actors.send(
                index, "update_policy_weights_", stored.reference, version, between=False
            )

    def send_and_wait(self, stored: Stored, index: int) -> None:
        """As :meth:`send`, and wait for the actor's answer."""
        self._actors.answer(self.send(stored, index), index)

    def load(self, version: Any, follows: bool) -> None:
        """Set the version of a state, unless policies follow a channel and keep their weights."""
        with self.lock:
            if self._newest is None or not follows:
                self._versions.version = version

    def _number(self, stored: Stored) -> Any:
        """The version of stored weights: a new one for each object."""
        name = stored.reference.hex()
        if name != self._newest:
            self._newest = name
            self._versions.increment_version()
        return self._versions.version

    def _to_all(self, method: str, stored: Stored, *args: Any, between: bool) -> None:
        """Send weights to all actors under one version, which is undone if every actor refuses."""
        with self.lock:
            newest, before = self._newest, self._versions.version
            with uninterrupted():
                version = self._number(stored)
                answers = self._actors.ask_all(
                    method, stored.reference, *args, version, between=between
                )
            failed = self._actors.failures(answers, None if between else self._actors.timeout)
            if failed.refused and version != before:
                self._newest, self._versions.version = newest, before
            if failed.first is not None:
                raise failed.first


class InFirstActor:
    """Calls the distributor in the first actor, for a collector with handles in several processes.

    Args:
        actors: the actors of the collector.
        versions: the tracker of this process, which gets the versions that the actor counts.

    Attributes:
        lock: held while this process sends an update.
    """

    def __init__(self, actors: Actors, versions: Any) -> None:
        self.lock: Any = threading.RLock()
        renew_in_children(self, lock=threading.RLock)
        self._actors, self._versions = actors, versions

    def to_first_actor(self) -> InFirstActor:
        """This object, as the distributor is there already."""
        return self

    def version(self) -> Any:
        """The newest version."""
        # Not in the concurrency group of updates, which may wait for batches.
        asked = self._actors.send(0, "version", between=False)
        (version,) = self._actors.wait([asked], self._actors.timeout)
        if version != self._versions.version:
            self._versions.version = version
        return version

    def publish(self, stored: Stored) -> None:
        """As :meth:`Distributor.publish`."""
        self._actors.wait([self._ask("publish", stored)], self._actors.timeout)

    def update(self, stored: Stored, worker_ids: Any) -> None:
        """As :meth:`Distributor.update`."""
        self._actors.wait([self._ask("update", stored, worker_ids)], None)

    def count(self) -> None:
        """As :meth:`Distributor.count`."""
        self._actors.wait([self._ask("count")], self._actors.timeout)

    def send(self, stored: Stored, index: int) -> Any:
        """As :meth:`Distributor.send`."""
        return self._ask("send_and_wait", stored, index)

    def load(self, version: Any, follows: bool) -> None:
        """As :meth:`Distributor.load`."""
        self._actors.wait([self._ask("load", version, follows)], self._actors.timeout)

    def _ask(self, method: str, *args: Any) -> Any:
        return self._actors.send(0, "distribute", method, args, group=UPDATES)
