"""The trainer's end of a scheme's channel, which publishes versions and watches the readers."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from fusedrl.channel import ReaderInfo, WeightChannel
from fusedrl.weights.follow import module_of

logger = logging.getLogger("fusedrl")

POLL_S = 0.005


class TrainerEnd:
    """Publishes versions, and finds workers that died or still compute with older ones.

    Args:
        channel: the channel, which is closed with this end.
        wait: whether an update waits for policy calls that compute with an older version.
        timeout: seconds that an update waits.
    """

    def __init__(self, channel: WeightChannel, wait: bool, timeout: float) -> None:
        self.channel = channel
        self._wait = wait
        self._timeout = timeout

    def publish(self, weights: Any, version: int | None) -> int:
        """Publish one version, without regard to the workers."""
        if weights is not None and not isinstance(weights, Mapping):
            weights = module_of(weights)
        published = self.channel.publish(weights, version)
        assert published is not None
        return published

    def settle(self, version: int) -> None:
        """After ``version`` is published: log dead workers, or wait for the living ones.

        Raises:
            RuntimeError: with ``wait``, a worker is dead.
            TimeoutError: with ``wait``, a policy call with an older version did not end in time.
        """
        deadline = time.monotonic() + self._timeout
        while late := self._late(version):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"version: expected no policy call with one older than {version} after "
                    f"{self._timeout} s, got {'; '.join(late)}; raise timeout if calls take longer"
                )
            time.sleep(POLL_S)

    def _late(self, version: int) -> list[str]:
        readers = self.channel.readers()
        if dead := [reader for reader in readers if not reader.alive]:
            self._tell(dead, version)
        return [
            f"pid {reader.pid} computes with {min(reader.leased)}"
            for reader in readers
            if self._wait and reader.leased and min(reader.leased) < version
        ]

    def _tell(self, dead: list[ReaderInfo], version: int) -> None:
        pids = ", ".join(str(reader.pid) for reader in dead)
        told = f"worker_ids: expected living workers, got dead: pid {pids}; the others"
        if self._wait:
            raise RuntimeError(
                f"{told} have version {version} or are getting it; see in the dead workers' output "
                "why they ended, and make another collector"
            )
        logger.warning("%s get version %d", told, version)
