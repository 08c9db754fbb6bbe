"""Lets a server go on whose trainer ended in the middle of an update."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fusedrl.vllm.engines import Server
from fusedrl.vllm.updates import Attempt, go_on, run_calls

# Seconds between two looks at whether the trainer lives.
_LOOK = 0.5
# Seconds after which all calls of a trainer that ended have reached the engine.
_SETTLED = 1.0
_TRIES = 5
# Seconds for a call of a server by its own worker.
_REACHED = 5.0

logger = logging.getLogger("fusedrl")


class PauseGuard:
    """Watches a trainer from a worker of the engine that it updates.

    Args:
        attempt: what the trainer said last, for which there is a guard of its own.
        message: the trainer's, with the address of its channel.
        is_dead: whether the trainer has ended without saying so.
        version_of: returns the version that an attempt has loaded as a whole, or ``None``.
    """

    def __init__(
        self,
        attempt: Attempt,
        message: Any,
        is_dead: Callable[[], bool],
        version_of: Callable[[str], int | None],
    ) -> None:
        self.attempt = attempt
        self.session: str = message.session
        self._message = {**asdict(message), "hold": None}
        self._is_dead = is_dead
        self._version_of = version_of
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="fusedrl-pause-guard", daemon=True).start()

    @property
    def is_watching(self) -> bool:
        """Whether the update goes on, or is being recovered from."""
        return not self._over.is_set()

    def end(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK):
            if self._is_dead():
                time.sleep(_SETTLED)
                self._recover()
                self._over.set()

    def _recover(self) -> None:
        for _ in range(_TRIES):
            try:
                return run_calls(self._let_go())
            except Exception:
                logger.exception("update: its trainer has ended, and the engine is paused still")
            time.sleep(_LOOK)

    async def _let_go(self) -> None:
        """Let the engine go on with the new version if it is there, else with the one before."""
        server = Server(self.attempt.server, timeout=60.0)
        if self.attempt.former is None or not await server.ask(server.is_paused):
            return
        label, version = self.attempt.former, self._version_of(self.attempt.name)
        if version is None:
            await server.ask(server.tell, {**self._message, "undo": self.attempt.name})
        else:
            label = str(version)
        await go_on(server, label, self.attempt.was_paused)
        logger.warning("update: its trainer has ended, and the engine goes on with %s", label)


def check_reachable(address: str) -> None:
    """Raise ``RuntimeError`` unless this process can call a server."""
    try:
        # The engine need not answer this call, and is busy with the one that comes here.
        with urllib.request.urlopen(f"{address}/version", timeout=_REACHED):
            pass
    except OSError as error:
        raise RuntimeError(
            f"engine: expected an address that its workers can call too, got {address}: {error}; "
            "they let the server go on if the trainer is killed: give one that both reach"
        ) from error
