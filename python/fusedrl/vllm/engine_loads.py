"""Lets an engine load a version of a channel: which calls it takes, and what undoes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from fusedrl.channel import WeightHandle
from fusedrl.vllm.controls import UNKNOWN, Control, InFlight, InLoop
from fusedrl.vllm.peft_models import PeftAdapters
from fusedrl.vllm.token_versions import STARTED_WITH

Value = TypeVar("Value")

# The object that last gave each engine weights, by the key of the engine.
_LAST: weakref.WeakValueDictionary[int | str, EngineLoads] = weakref.WeakValueDictionary()
# A later version may be published before the engine takes its lease, which is one of the newest.
_TRIES = 20
_UNSETTLED = (
    "engine: it may have this version, a part of it, or the former one; it answers under no "
    "version's number until an update succeeds"
)

logger = logging.getLogger("fusedrl")


class EngineLoads:
    """The updates of one engine from one channel.

    Args:
        handle: the handle of the channel.
        newest: returns the version that is published last.
        control: calls the engine.
        in_flight: as for :class:`~fusedrl.vllm.EngineWeights`.
        socket: path of the Unix socket that passes the channel, if the engine sees other pids.
        timeout: seconds that the engine's workers wait for a version.
        adapters: those of a channel with adapters alone, which a server does not take.

    Attributes:
        version: the version that the engine was given last; ``None`` before the first.
    """

    def __init__(
        self,
        handle: WeightHandle,
        newest: Callable[[], int | None],
        control: Control,
        *,
        in_flight: InFlight = "recompute",
        socket: str | None = None,
        timeout: float = 60.0,
        adapters: PeftAdapters | None = None,
    ) -> None:
        self.version: int | None = None
        self._address = asdict(handle) if socket is None else {**asdict(handle), "socket": socket}
        self._newest = newest
        self._control = control
        self._in_flight: InFlight = in_flight
        self._timeout = timeout
        self._adapters = adapters
        self._left_paused = False  # by an update that failed, perhaps under a version's label

    def check_synchronous(self) -> None:
        """Raise ``TypeError`` for an engine that is called in an event loop."""
        if isinstance(self._control, InLoop):
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
        await self._control.init(self._address)
        # The engine may still have a label from another channel, which means nothing in this one.
        await self._control.number(STARTED_WITH)

    def has(self, version: int) -> bool:
        """Whether the engine has a version, as far as the updates of this process tell."""
        return self.version == version and _LAST.get(self._control.key) is self

    def load(self, version: int) -> int:
        """Load a published version, or a later one, and return its number.

        Raises:
            ValueError, RuntimeError: the engine or its workers refused. The engine goes on with the
                version that it has, unless a note of the error says otherwise.
            TypeError: the engine is called in an event loop.
        """
        self.check_synchronous()
        return run_calls(self._load(version))

    async def load_async(self, version: int) -> int:
        """As :meth:`load`, for any engine; a cancellation takes effect after the update."""
        if isinstance(self._control, InLoop):
            return await self._load(version)
        return await to_its_end(asyncio.to_thread(run_calls, self._load(version)))

    async def _load(self, version: int) -> int:
        _LAST[self._control.key] = self
        attempt = Attempt()
        try:
            await self._hold(attempt)
            attempt.former = await self._control.label()
            attempt.was_paused = await self._control.paused()
            await self._hold(attempt, label=attempt.former, was_paused=attempt.was_paused)
            await self._control.pause(self._in_flight)
            attempt.unnamed = True
            await self._control.number(UNKNOWN)
        except BaseException as error:
            await self._give_up(attempt, error)
            raise
        loading = self._load_and_resume(version, attempt)
        return await (to_its_end(loading) if isinstance(self._control, InLoop) else loading)

    async def _hold(self, attempt: Attempt, **more: Any) -> None:
        """Have the engine recover by itself if this process ends from now on."""
        await self._control.hold({**self._address, "hold": {"attempt": attempt.name, **more}})

    async def _load_and_resume(self, version: int, attempt: Attempt) -> int:
        try:
            loaded = await self._load_paused(version, attempt)
            # A user's pause stays. The label tells it from one that an update left behind.
            if not attempt.was_paused or attempt.former == UNKNOWN or self._left_paused:
                await self._control.resume()
        except BaseException as error:
            await self._give_up(attempt, error)
            raise
        self.version, self._left_paused = loaded, False
        await self._release(attempt)
        return loaded

    async def _release(self, attempt: Attempt) -> None:
        """End :meth:`_hold`; where that fails, nothing is paused that would be let go on."""
        with contextlib.suppress(Exception):
            await self._hold(attempt, over=True)

    async def _load_paused(self, version: int, attempt: Attempt) -> int:
        for _ in range(_TRIES):
            await self._end_unfinished()
            if self._adapters is None:
                await self._control.start()
            try:
                await self._send(version, attempt)
            except Exception:
                newest = self._newest()
                if newest is None or newest <= version:
                    raise
                version = newest
            else:
                await self._control.forget()
                await self._number(version)
                return version
        raise RuntimeError(
            f"version: expected one that the engine can lease within {_TRIES} tries, got a channel "
            "that is published to faster; publish less often"
        )

    async def _send(self, version: int, attempt: Attempt) -> None:
        """Let the workers load a version."""
        attempt.sent = True
        update = {"version": version, "timeout": self._timeout, "attempt": attempt.name}
        # The address is sent too, as the engine may have been restarted, or read another channel.
        if self._adapters is None:
            await self._control.load({**update, "channel": self._address})
            return
        adapters = {"number": self._adapters.number, "scalings": self._adapters.scalings}
        await self._control.init({**self._address, "adapters": {**update, **adapters}})

    async def _number(self, version: int) -> None:
        if self._adapters is None:
            await self._control.finish(str(version))
        else:
            await self._control.number(str(version))

    async def _end_unfinished(self) -> None:
        """End an update that was left unfinished, or that only some of the workers began."""
        try:
            await self._control.init({"expect": "ended"})
        except Exception:
            # Workers that have no unfinished update refuse; of several, the last one raises.
            with contextlib.suppress(Exception):
                await self._control.finish(None)

    async def _give_up(self, attempt: Attempt, error: BaseException) -> None:
        """Let the engine go on, if its weights are unchanged."""
        try:
            if attempt.sent:
                await self._end_unfinished()
                await self._control.init({"expect": "untouched", "attempt": attempt.name})
            if attempt.unnamed:
                await self._control.number(attempt.former)
            # An engine that was paused may have been left with parts of two versions.
            if not attempt.was_paused:
                await self._control.resume()
        except BaseException:
            self._left_paused = self._left_paused or not attempt.was_paused
            _note(error, _UNSETTLED)
            with contextlib.suppress(BaseException):  # the first error is raised
                await self._control.number(UNKNOWN)
                await self._control.withhold()
        with contextlib.suppress(BaseException):
            await self._release(attempt)


@dataclass
class Attempt:
    """One update of an engine.

    Attributes:
        former: the label of the engine's weights when the update began.
        was_paused: whether the engine was paused then.
        unnamed: whether the label was replaced.
        sent: whether its workers were told to load a version.
        name: the name by which the workers know the update.
    """

    former: str = ""
    was_paused: bool = True
    unnamed: bool = False
    sent: bool = False
    name: str = field(default_factory=lambda: uuid.uuid4().hex)


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


def _note(error: BaseException, text: str) -> None:
    """Say more, whatever is raised."""
    if sys.version_info >= (3, 11):
        error.add_note(text)
    else:
        logger.error(text)


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
