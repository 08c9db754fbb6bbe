"""Finds workers that died, or that still compute with an older version than the published one."""

from __future__ import annotations

import logging
import time

from fusedrl.channel import WeightChannel

logger = logging.getLogger("fusedrl")

POLL_S = 0.005


def settle(channel: WeightChannel, version: int, wait: bool, timeout: float) -> None:
    """Log dead workers, or wait until the living ones compute with nothing older than ``version``.

    Raises:
        RuntimeError: with ``wait``, a worker is dead.
        TimeoutError: with ``wait``, a policy call with an older version did not end in time.
    """
    deadline = time.monotonic() + timeout
    while late := _late(channel, version, wait):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"version: expected no policy call with one older than {version} after "
                f"{timeout} s, got {'; '.join(late)}; raise timeout if calls take longer"
            )
        time.sleep(POLL_S)


def _late(channel: WeightChannel, version: int, wait: bool) -> list[str]:
    readers = channel.readers()
    if dead := ", ".join(str(reader.pid) for reader in readers if not reader.alive):
        said = f"worker_ids: expected living workers, got dead: pid {dead}; the others"
        if wait:
            raise RuntimeError(
                f"{said} have version {version} or are getting it; see in the dead workers' output "
                "why they ended, and make another collector"
            )
        logger.warning("%s get version %d", said, version)
    return [
        f"pid {reader.pid} computes with {min(reader.leased)}"
        for reader in readers
        if wait and reader.leased and min(reader.leased) < version
    ]
