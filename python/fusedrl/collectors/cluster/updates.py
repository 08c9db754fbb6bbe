"""Gives each update of a collector's actors one number, and sends updates one after the other."""

from __future__ import annotations

from typing import Any

from fusedrl.collectors.cluster.ray_actors import BETWEEN, ActorDied, Actors

# A reference to weights in Ray's store, in a list, which keeps Ray from fetching them.
Stored = list[Any]


class Updates:
    """Numbers the updates of a collector, and sends them to all of its actors in the same order.

    It lives in the first actor, whose concurrency group for updates calls one method after the
    other, whichever process asks. Each method returns the newest version.

    Args:
        actors: the actors of the collector.
        versions: the tracker that counts, a :class:`PolicyVersion`.
    """

    def __init__(self, actors: Actors, versions: Any) -> None:
        self._actors, self._versions = actors, versions
        self._newest: str | None = None  # the id of the newest version's weights in Ray's store

    def version(self) -> Any:
        """The newest version."""
        return self._versions.version

    def publish(self, stored: Stored) -> Any:
        """Let every actor publish weights."""
        return self._to_all("update_policy_weights_", stored)

    def update(self, stored: Stored, worker_ids: Any) -> Any:
        """Let the updater in every actor take weights."""
        return self._to_all("update_by_updater", stored, worker_ids, waits=True)

    def count(self) -> Any:
        """Count a version without new weights."""
        self._versions.increment_version()
        answers = self._actors.send_all("renumber", self.version(), group=None)
        self._actors.wait(answers, self._actors.deadline())
        return self.version()

    def send(self, stored: Stored, index: int) -> tuple[Any, list[Any]]:
        """Send weights to one actor; returns a reference to its answer, too, in a list."""
        version = self._number(stored)
        sent = self._actors.send(index, "update_policy_weights_", stored[0], version, group=None)
        return version, [sent]

    def load(self, version: Any, follows: bool) -> Any:
        """Set the version of a state, unless policies follow a channel and keep their weights."""
        if self._newest is None or not follows:
            self._versions.version = version
        return self.version()

    def _number(self, stored: Stored) -> Any:
        """The version of stored weights: a new one for each object."""
        name = stored[0].hex()
        if name != self._newest:
            self._newest = name
            self._versions.increment_version()
        return self.version()

    def _to_all(self, method: str, stored: Stored, *args: Any, waits: bool = False) -> Any:
        """Send weights to all actors under one version, which is undone if every actor refuses.

        With ``waits`` they take them between two batches, and there is no time limit.
        """
        before = self._newest, self.version()
        version = self._number(stored)
        group, until = (BETWEEN, None) if waits else (None, self._actors.deadline())
        answers = self._actors.send_all(method, stored[0], *args, version, group=group)
        failed = self._actors.failures(answers, until)
        refused = [error for error in failed if not isinstance(error, ActorDied | TimeoutError)]
        if len(refused) == len(answers):
            self._newest, self._versions.version = before
        if failed:
            raise failed[0]
        return version
