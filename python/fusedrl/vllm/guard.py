"""Brings an update of a server to its end if the trainer ends in its middle."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Any

from fusedrl.vllm.engines import Server
from fusedrl.vllm.update import bring, run_calls

# Seconds between two looks at whether the trainer lives.
_LOOK = 0.5
# Seconds after which all calls of a trainer that ended have reached the engine.
_SETTLED = 1.0
_TRIES = 5

logger = logging.getLogger("fusedrl")


class PauseGuard:
    """Watches a trainer from a worker of the server that it updates.

    It watches the process: a trainer that has closed its channel may update the server still.

    Attributes:
        over: whether the update is: set by who ends it, and by this when it has ended it.
    """

    def __init__(self, server: str, address: dict[str, Any], version: int, stays: bool) -> None:
        self.session: str = address["session"]
        self.over = threading.Event()
        self._server = Server(server, timeout=60.0)
        self._update = address, version, stays
        threading.Thread(target=self._watch, name="fusedrl-pause-guard", daemon=True).start()

    def _watch(self) -> None:
        try:
            if self._has_gone(self._update[0]["pid"]) and not self.over.wait(_SETTLED):
                self._recover()
        finally:
            self.over.set()

    def _has_gone(self, trainer: int) -> bool:
        """Wait until the trainer ends; ``False`` if the update is over before that."""
        try:
            process = os.pidfd_open(trainer)
        except ProcessLookupError:
            return True
        try:
            ended = select.poll()
            ended.register(process)
            while not self.over.wait(_LOOK):
                if ended.poll(0):
                    return True
            return False
        finally:
            os.close(process)

    def _recover(self) -> None:
        server = self._server
        for _ in range(_TRIES):
            try:
                if run_calls(server.ask(server.is_paused)):
                    run_calls(bring(server, *self._update))
                    logger.warning("update: its trainer has gone, the server goes on without it")
                return
            except Exception:
                logger.exception("update: its trainer has gone, and the engine is paused still")
            time.sleep(_LOOK)
