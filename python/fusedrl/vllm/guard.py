"""Completes an update of a server if its trainer ends in the middle."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import Any

from fusedrl.vllm.engines import Server
from fusedrl.vllm.update import load_leased, run_calls

_POLL_S = 0.5  # between two checks whether a trainer has ended
_GRACE_S = 1.0  # after which all calls of a trainer that ended have reached the engine
_TRIES = 5

logger = logging.getLogger("fusedrl")


def guard(server: str, address: dict[str, Any], version: int, stays: bool) -> threading.Event:
    """Watch a trainer from a worker of the server that it updates.

    It watches the process, since a trainer may close its channel and still update the server.

    Returns:
        An event that is set when the update is over, by whoever ends it or by this guard.
    """
    over, engine = threading.Event(), Server(server)

    def watch() -> None:
        try:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                _wait_for_end(address["pid"], over)
            for _ in range(_TRIES):
                if over.wait(_GRACE_S):
                    return
                try:
                    if run_calls(engine.ask(engine.is_paused)):
                        run_calls(load_leased(engine, address, version, stays))
                        logger.warning("update: its trainer has ended; the server completed it")
                    return
                except Exception:
                    logger.exception("update: its trainer has ended, but the engine is paused")
        finally:
            over.set()

    threading.Thread(target=watch, name="fusedrl-pause-guard", daemon=True).start()
    return over


def _wait_for_end(trainer: int, over: threading.Event) -> None:
    """Wait until a process ends, or the update is over."""
    process = os.pidfd_open(trainer)
    try:
        ended = select.poll()
        ended.register(process)
        while not over.wait(_POLL_S) and not ended.poll(0):
            pass
    finally:
        os.close(process)
