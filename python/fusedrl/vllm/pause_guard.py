"""Brings an update of a server to its end if the trainer ends in its middle, or leaves it."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from typing import Any

from fusedrl.vllm.engines import DIRECTLY, Server
from fusedrl.vllm.updates import bring, pause, run_calls

# Seconds between two looks at whether the trainer lives.
_LOOK = 0.5
# Seconds after which all calls of a trainer that ended have reached the engine.
_SETTLED = 1.0
_TRIES = 5
# Seconds for a call of a server by its own worker.
_REACHED = 5.0

logger = logging.getLogger("fusedrl")


class PauseGuard:
    """Watches a trainer from a worker of the server that it updates.

    It watches the process: a trainer that has closed its channel may update the server still.

    Args:
        server: the address of the server.
        address: the fields of the channel's address.
        version: that the workers have leased.

    Attributes:
        stays: whether the server stays paused after the update; ``None`` as long as the trainer has
            not paused it.
        left: whether the trainer, which runs on, has left the update to this.
    """

    def __init__(self, server: str, address: dict[str, Any], version: int) -> None:
        self.session: str = address["session"]
        self.stays: bool | None = None
        self.left = False
        self._server = Server(server, timeout=60.0)
        self._address = address
        self._version = version
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="fusedrl-pause-guard", daemon=True).start()

    @property
    def is_watching(self) -> bool:
        """Whether the update goes on, by the trainer or by this."""
        return not self._over.is_set()

    def end(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        try:
            if self._trainer_has_gone():
                time.sleep(_SETTLED)
                self._recover()
        finally:
            self._over.set()

    def _trainer_has_gone(self) -> bool:
        """Wait until it ends or leaves the update; ``False`` if the update is over before that."""
        try:
            process = os.pidfd_open(self._address["pid"])
        except ProcessLookupError:
            return True
        try:
            ended = select.poll()
            ended.register(process)
            while not self._over.wait(_LOOK):
                if self.left or ended.poll(0):
                    return True
            return False
        finally:
            os.close(process)

    def _recover(self) -> None:
        for _ in range(_TRIES):
            try:
                return run_calls(self._go_on())
            except Exception:
                logger.exception("update: its trainer has gone, and the engine is paused still")
            time.sleep(_LOOK)

    async def _go_on(self) -> None:
        server = self._server
        if self.stays is None or not await server.ask(server.is_paused):
            return
        await pause(server, "keep")
        await bring(server, self._address, self._version, self.stays)
        logger.warning("update: its trainer has gone, the engine goes on with %s", self._version)


def check_reachable(address: str) -> None:
    """Raise ``RuntimeError`` unless this process can call a server."""
    try:
        # The engine need not answer this call, and is busy with the one that comes here.
        with DIRECTLY.open(f"{address}/version", timeout=_REACHED):
            pass
    except OSError as error:
        raise RuntimeError(
            f"engine: expected an address that its workers can call too, got {address}: {error}; "
            "they let the server go on if the trainer is killed: give one that both reach"
        ) from error
