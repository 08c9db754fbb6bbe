"""Lets an engine load a version of a channel: which calls it takes, and what undoes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fusedrl.channel import WeightHandle
from fusedrl.vllm.engines import Engine, InFlight
from fusedrl.vllm.token_versions import STARTED_WITH

Value = TypeVar("Value")

# The label of tokens whose weights are not known, in the place of a version.
UNKNOWN = "unknown"
# A server's answer while another trainer updates it, or while it recovers from one that ended.
BUSY = "update: expected no other one at the same time"
# Seconds until a busy server is asked again, and for how long.
_AGAIN, _PATIENCE = 0.5, 60.0
# A later version may be published before the engine takes its lease, which is one of the newest.
_TRIES = 20
_UNSETTLED = (
    "engine: expected to go back to the version before, got: {}; it may have parts of two "
    "versions and answers under no version's number: update it again, or start a new one if it has "
    "ended"
)
# The object that last gave each engine weights, by the key of the engine.
_LAST: weakref.WeakValueDictionary[int | str, Updates] = weakref.WeakValueDictionary()

logger = logging.getLogger("fusedrl")


@dataclass
class Attempt:
    """One update of an engine.

    Attributes:
        server: the address of a server, which outlives its trainer; ``None`` for another engine.
        former: the label of the engine's weights when the update began; ``None`` until it is known.
        was_paused: whether the engine was paused then, and shall stay so.
        may_run: whether the engine may have the new version's name, and generate with it.
        name: one that no other update has.
    """

    server: Any = None
    former: str | None = None
    was_paused: bool = False
    may_run: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


class Updates:
    """The updates of one engine from one channel.

    An update takes the engine for itself, notes its label and whether it is paused, pauses it,
    names its weights unknown, drops what was computed with them, lets the workers load the version,
    names the weights by it, lets requests go on, and leaves the engine. Whichever of these fails,
    the workers load what they had before, which gets its name again.

    Args:
        handle: the handle of the channel.
        newest: returns the version that is published last.
        engine: the engine.
        in_flight: as for :class:`~fusedrl.vllm.EngineWeights`.
        socket: path of the Unix socket that passes the channel, if the engine sees other pids.
        timeout: seconds that the engine's workers wait for a version.
        keep_previous: as for :class:`~fusedrl.vllm.EngineWeights`.
        verify: as for :class:`~fusedrl.vllm.EngineWeights`.

    Attributes:
        version: the version that the engine was given last; ``None`` before the first.
    """

    def __init__(
        self,
        handle: WeightHandle,
        newest: Callable[[], int | None],
        engine: Engine,
        *,
        in_flight: InFlight = "recompute",
        socket: str | None = None,
        timeout: float = 60.0,
        keep_previous: bool = True,
        verify: bool = False,
    ) -> None:
        self.version: int | None = None
        self._address = asdict(handle) if socket is None else {**asdict(handle), "socket": socket}
        self._newest = newest
        self._engine = engine
        self._in_flight: InFlight = in_flight
        self._timeout = timeout
        self._options = {"timeout": timeout, "keep": keep_previous, "verify": verify}
        self._left_paused = False  # by an update that failed, perhaps under a version's label

    def check_synchronous(self) -> None:
        """Raise ``TypeError`` for an engine that is called in an event loop."""
        if self._engine.in_loop:
            raise TypeError(
                "engine: expected a vllm.LLM or a server, got an AsyncLLM, which is called in its "
                "event loop; await update_async() there"
            )

    def open(self) -> None:
        """Let the engine read the channel, of which it has no version yet.

        Raises:
            ValueError, RuntimeError: the engine's workers cannot read the channel, or their model
                has other weights.
        """
        self.check_synchronous()
        run_calls(self._open())

    async def _open(self) -> None:
        await self._tell()
        # The engine may still have a label from another channel, which means nothing in this one.
        await self._engine.ask(self._engine.name, STARTED_WITH)

    def has(self, version: int) -> bool:
        """Whether the engine has a version, as far as the updates of this process tell."""
        return self.version == version and _LAST.get(self._engine.key) is self

    def load(self, version: int) -> int:
        """Load a published version, or a later one, and return its number.

        Raises:
            ValueError, RuntimeError: the engine or its workers refused. The engine goes on with the
                version before, unless a note of the error says otherwise.
            TypeError: the engine is called in an event loop.
        """
        self.check_synchronous()
        return run_calls(self._load(version))

    async def load_async(self, version: int) -> int:
        """As :meth:`load`, for any engine; a cancellation takes effect after the update."""
        if self._engine.in_loop:
            return await self._load(version)
        return await to_its_end(asyncio.to_thread(run_calls, self._load(version)))

    async def _load(self, version: int) -> int:
        engine = self._engine
        attempt = Attempt(engine.address)
        _LAST[engine.key] = self
        try:
            await self._hold(attempt)
            attempt.was_paused = await engine.ask(engine.is_paused)
            attempt.former = await engine.ask(engine.label)
            await self._hold(attempt)
            await engine.ask(engine.pause, "keep" if self._in_flight == "recompute" else "wait")
        except BaseException as error:
            await self._go_back(attempt, error)
            raise
        loading = self._load_paused(version, attempt)
        return await (to_its_end(loading) if engine.in_loop else loading)

    async def _load_paused(self, version: int, attempt: Attempt) -> int:
        engine = self._engine
        # A user's pause stays. The label tells it from one that an update left behind.
        stays = attempt.was_paused and attempt.former != UNKNOWN and not self._left_paused
        try:
            await engine.ask(engine.name, UNKNOWN)
            await engine.forget()
            version = await self._send(version, attempt)
            attempt.may_run = True
            await go_on(engine, str(version), stays)
        except BaseException as error:
            await self._go_back(attempt, error)
            raise
        self.version, self._left_paused = version, False
        await self._end(attempt)
        return version

    async def _send(self, version: int, attempt: Attempt) -> int:
        """Let the workers load a version, or a later one; its number."""
        update: dict[str, Any] = {**self._options, "attempt": attempt.name}
        for _ in range(_TRIES):
            try:
                await self._tell(update={**update, "version": version})
            except Exception:
                newest = self._newest()
                if newest is None or newest <= version:
                    raise
                version = newest
            else:
                return version
        raise RuntimeError(
            f"version: expected one that the engine can lease within {_TRIES} tries, got a channel "
            "that is published to faster; publish less often"
        )

    async def _tell(self, **message: Any) -> None:
        # The address is sent each time, as the engine may have been restarted, or read another one.
        await self._engine.ask(self._engine.tell, {**self._address, **message})

    async def _hold(self, attempt: Attempt) -> None:
        """Take a server for this update, and have it recover by itself if this process ends."""
        if attempt.server is None:  # other engines end with this process
            return
        deadline = time.monotonic() + self._timeout + _PATIENCE
        while True:
            try:
                return await self._tell(hold=asdict(attempt))
            except RuntimeError as error:
                if BUSY not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_AGAIN)

    async def _end(self, attempt: Attempt) -> None:
        """Leave the engine; if it does not learn of it, it does so from the next update."""
        with contextlib.suppress(Exception):
            await self._tell(over=attempt.name)

    async def _go_back(self, attempt: Attempt, error: BaseException) -> None:
        """Let the engine go on with the version before, and say so."""
        engine = self._engine
        if attempt.former is not None:
            try:
                if attempt.may_run:
                    await engine.ask(engine.pause, "keep")
                    await engine.ask(engine.name, UNKNOWN)
                    await engine.forget()
                await self._tell(undo=attempt.name)
                await go_on(engine, attempt.former, attempt.was_paused)
                if attempt.former != UNKNOWN:
                    _note(error, f"engine: it goes on with the version before, {attempt.former!r}")
            except BaseException as failure:
                self._left_paused = self._left_paused or not attempt.was_paused
                _note(error, _UNSETTLED.format(failure))
                with contextlib.suppress(BaseException):  # the first error is raised
                    await engine.ask(engine.name, UNKNOWN)
                    if not engine.requests_wait:
                        # A model with parts of two versions answers none of them.
                        await engine.ask(engine.resume)
        with contextlib.suppress(BaseException):
            await self._end(attempt)


async def go_on(engine: Engine, label: str, stays_paused: bool) -> None:
    """Name the weights of a paused engine, and let requests go on."""
    await engine.ask(engine.name, label)
    if not stays_paused:
        await engine.ask(engine.resume)


async def to_its_end(work: Coroutine[Any, Any, Value]) -> Value:
    """Await work that must not be interrupted: a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # asyncio would log an exception that nobody retrieves
        raise


def run_calls(calls: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine that never waits for an event loop, and return its result."""
    try:
        calls.send(None)
    except StopIteration as done:
        return done.value
    calls.close()
    raise RuntimeError(
        "engine: expected calls that return, got one for an event loop; await update_async() there"
    )


def _note(error: BaseException, text: str) -> None:
    """Say more, whatever is raised."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        logger.error(text)
