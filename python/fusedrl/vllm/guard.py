"""Brings an update of a server to its end if the trainer ends in its middle."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import Any

from fusedrl.vllm.engines import Server
from fusedrl.vllm.update import bring, run_calls

_LOOK = 0.5  # seconds within which the end of a trainer is noticed
_SETTLED = 1.0  # seconds after which all its calls have reached the engine
_TRIES = 5

logger = logging.getLogger("fusedrl")


def guard(server: str, address: dict[str, Any], version: int, stays: bool) -> threading.Event:
    """Watch a trainer from a worker of the server that it updates.

    It watches the process: a trainer that has closed its channel may update the server still.

    Returns:
        Whether the update is over: set by who ends it, and by this when it has ended it.
    """
    over, engine = threading.Event(), Server(server)

    def watch() -> None:
        try:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                _wait_for_end(address["pid"], over)
            for _ in range(_TRIES):
                if over.wait(_SETTLED):
                    return
                try:
                    if run_calls(engine.ask(engine.is_paused)):
                        run_calls(bring(engine, address, version, stays))
                        logger.warning("update: its trainer has gone, the server goes on alone")
                    return
                except Exception:
                    logger.exception("update: its trainer has gone, and the engine is paused still")
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
        while not over.wait(_LOOK) and not ended.poll(0):
            pass
    finally:
        os.close(process)
