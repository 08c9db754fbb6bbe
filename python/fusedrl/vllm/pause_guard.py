"""Lets a server go on whose trainer ended in the middle of an update."""

from __future__ import annotations

import logging
import threading
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from fusedrl.vllm.engines import Server
from fusedrl.vllm.updates import run_calls

# Seconds between two looks at whether the trainer lives.
_LOOK = 0.5
# Seconds after which all calls of a trainer that ended have reached the engine.
_SETTLED = 1.0
_TRIES = 5
# Seconds for a call of a server by its own worker.
_REACHED = 5.0

logger = logging.getLogger("fusedrl")


@dataclass
class Hold:
    """What an engine has to know to go on without the trainer that paused it.

    Attributes:
        server: the address of the engine's own server.
        attempt: the update's, a name that no other one has.
        label: that of the weights when the update began; ``None`` as long as nothing is paused.
        was_paused: whether the engine was paused then, and shall stay so.
        over: the update has ended, and nothing is to be watched any more.
    """

    server: str
    attempt: str
    label: str | None = None
    was_paused: bool = False
    over: bool = False


class PauseGuard:
    """Watches a trainer from a worker of the engine that it updates.

    Args:
        hold: what the trainer said last, for which there is a guard of its own.
        is_dead: whether the trainer has ended without saying so.
        label_after: returns the label of the weights that the model has after a trainer that said
            this last; ``None`` if they are parts of two versions.
    """

    def __init__(
        self, hold: Hold, is_dead: Callable[[], bool], label_after: Callable[[Hold], str | None]
    ) -> None:
        self._hold = hold
        self._is_dead = is_dead
        self._label_after = label_after
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
        """Let the engine go on with the whole version that it has, if it has one."""
        server = Server(self._hold.server, timeout=60.0)
        if self._hold.label is None or not await server.ask(server.is_paused):
            return
        label = self._label_after(self._hold)
        if label is None:
            logger.error(
                "update: its trainer has ended while the engine loaded a part of a version, and it "
                "stays paused until an update succeeds"
            )
            return
        await server.forget()
        await server.ask(server.name, label)
        if not self._hold.was_paused:
            await server.ask(server.resume)
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
