"""Lets an engine load a version of a channel: which calls it takes, and what repeats them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import asdict
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
# The object that last gave each engine weights, by the key of the engine.
_LAST: weakref.WeakValueDictionary[int | str, Updates] = weakref.WeakValueDictionary()

logger = logging.getLogger("fusedrl")


class Updates:
    """The updates of one engine from one channel.

    An update has three parts. First the workers lease the version: everything that can be refused
    is refused here, and nothing has changed. Then the engine is paused, and drops what it has
    computed; if that fails, it goes on with its own version. At last :func:`bring` changes the
    weights. This is done once more if it fails, since the workers still have the lease. If it fails
    again, the engine has no version's label, and answers nothing until an update succeeds.

    Args:
        handle: the handle of the channel.
        newest: returns the version that is published last.
        engine: the engine.
        in_flight: as for :class:`~fusedrl.vllm.EngineWeights`.
        timeout: seconds that the engine's workers wait for a version.

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
        timeout: float = 60.0,
    ) -> None:
        self.version: int | None = None
        self._address = asdict(handle)
        self._newest = newest
        self._engine = engine
        self._in_flight: InFlight = in_flight
        self._timeout = timeout
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
            ValueError, RuntimeError: the engine or its workers refused, and the engine goes on with
                the version that it has; or loading has failed twice, which the message says.
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
        engine, was_paused = self._engine, True
        _LAST[engine.key] = self
        try:
            version = await self._leased(version)
            was_paused = await engine.ask(engine.is_paused)
            # A user's pause stays. The label tells it from one that an update left behind.
            stays = was_paused and not self._left_paused
            stays = stays and await engine.ask(engine.label) != UNKNOWN
            if engine.address is not None:
                await self._tell(stays=stays)
            await pause(engine, "keep" if self._in_flight == "recompute" else "wait")
        except BaseException:
            await self._leave(resumes=not was_paused)
            raise
        loading = self._load_paused(version, stays)
        return await (to_its_end(loading) if engine.in_loop else loading)

    async def _leased(self, version: int) -> int:
        """Have the workers lease a version, or a later one; its number."""
        address = self._engine.address
        deadline = time.monotonic() + self._timeout + _PATIENCE
        for _ in range(_TRIES):
            lease = {"lease": version, "timeout": self._timeout, "server": address}
            try:
                while not await self._has_leased(lease, deadline):
                    time.sleep(_AGAIN)
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

    async def _has_leased(self, lease: dict[str, Any], deadline: float) -> bool:
        """Whether the workers have a lease; false, before a deadline, if a server is busy."""
        try:
            await self._tell(**lease)
        except RuntimeError as error:
            if BUSY not in str(error) or time.monotonic() > deadline:
                raise
            return False
        return True

    async def _load_paused(self, version: int, stays: bool) -> int:
        engine = self._engine
        try:
            await bring(engine, self._address, version, stays)
        except BaseException as error:
            logger.warning("update: version %s is loaded again, after %r", version, error)
            try:
                await pause(engine, "keep")
                await bring(engine, self._address, version, stays)
            except BaseException as again:
                await self._stop(stays, over=isinstance(again, Exception))
                if isinstance(again, Exception):
                    raise RuntimeError(
                        f"engine: expected to load version {version} at the second try, got "
                        f"{error}; it answers under no version's number, or not at all: update it "
                        "again, or start a new one if it has ended"
                    ) from again
                raise
            await self._done(version)
            if not isinstance(error, Exception):  # an interrupt
                raise
        else:
            await self._done(version)
        return version

    async def _done(self, version: int) -> None:
        self.version, self._left_paused = version, False
        await self._leave(resumes=False)

    async def _stop(self, stays: bool, over: bool) -> None:
        """Let nothing be taken for the answer of a version, after two tries to load one."""
        engine = self._engine
        self._left_paused = not stays
        with contextlib.suppress(BaseException):  # the error is raised
            await engine.ask(engine.name, UNKNOWN)
            if not engine.requests_wait:
                # A model with parts of two versions answers none of them.
                await engine.ask(engine.resume)
        await self._leave(resumes=False, over=over)

    async def _leave(self, resumes: bool, over: bool = True) -> None:
        """Say that an update is over; an engine that does not hear it hears the next one.

        If it is not, because it was interrupted, a server has to bring it to its end.
        """
        try:
            if resumes:
                await self._engine.ask(self._engine.resume)
        except BaseException:
            self._left_paused = True
            over = False
        left = not over and self._engine.address is not None
        with contextlib.suppress(BaseException):
            await self._tell(**({"left": True} if left else {"over": True}))

    async def _tell(self, **message: Any) -> None:
        # The address is sent each time, as the engine may have been restarted, or read another one.
        await self._engine.ask(self._engine.tell, {**self._address, **message})


async def pause(engine: Engine, how: str) -> None:
    """Pause an engine, and drop what it has computed with its weights."""
    await engine.ask(engine.pause, how)
    await engine.forget()


async def bring(engine: Engine, address: dict[str, Any], version: int, stays: bool) -> None:
    """Have a paused engine load the version that its workers have leased; may be called again.

    Args:
        engine: the engine.
        address: the fields of the channel's address.
        version: the version.
        stays: whether the engine stays paused.
    """
    await engine.ask(engine.name, UNKNOWN)
    await engine.ask(engine.tell, {**address, "load": version})
    await engine.ask(engine.name, str(version))
    if not stays:
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
