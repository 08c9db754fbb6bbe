"""One update of an engine: the calls that it takes, which are repeated rather than undone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from dataclasses import asdict
from typing import Any, TypeVar

from fusedrl.channel import WeightChannel, WeightHandle, WeightReader
from fusedrl.vllm.engines import Engine, InFlight

Value = TypeVar("Value")

# The label of tokens whose weights are not known, in the place of a version.
UNKNOWN = "unknown"
# A server's answer while another trainer updates it, or while it recovers from one that ended.
BUSY = "update: expected no other one at the same time"
# Seconds until a busy server is asked again, and for how long.
_AGAIN, _PATIENCE = 0.5, 60.0

logger = logging.getLogger("fusedrl")


class Update:
    """The updates of one engine from one channel; each is one :meth:`run`, within ``engine.lock``.

    Args:
        engine, handle: the engine, and the channel's.
        source: the channel, or a reader of it.
        in_flight, timeout: as for :class:`~fusedrl.vllm.EngineWeights`.
    """

    def __init__(
        self,
        engine: Engine,
        handle: WeightHandle,
        source: WeightChannel | WeightReader,
        in_flight: InFlight = "recompute",
        timeout: float = 60.0,
    ) -> None:
        self.engine = engine
        self.version: int | None = None  # that the engine was given last
        self._address = asdict(handle)
        self._source = source
        self._in_flight = in_flight
        self._timeout = timeout

    async def run(self, version: int | None) -> int:
        """Load a published version, or a later one, and return its number.

        First the workers lease it: what can be refused is refused here, and nothing has changed.
        Then :func:`bring` changes the engine, again if that fails, as the workers have the lease
        still. If it fails again, the engine goes on with the version that it had if it has it
        still; otherwise it has the label of none, and answers nothing until an update succeeds.
        """
        engine, first = self.engine, None
        if version is None:
            raise RuntimeError("version: expected a published one, got none; call update() first")
        engine.has, engine.timeout = None, self._timeout
        is_paused = not engine.stopped and await engine.ask(engine.is_paused)
        # By somebody, who is no update that failed.
        stays = is_paused and await engine.ask(engine.label) != UNKNOWN
        try:
            version = await self._lease(version, stays)
            engine.stopped = not stays
            if self._in_flight == "wait":
                await engine.ask(engine.pause, "wait")
            for is_last in (False, True):
                try:
                    calls = bring(engine, self._address, version, stays)
                    await (to_its_end(calls) if engine.in_loop else calls)
                    break
                except BaseException as error:
                    if is_last:
                        raise
                    first = error
                    logger.warning("update: version %s is loaded again, after %r", version, error)
            self.version, engine.stopped = version, False
            engine.has = self._address["session"], version
        except BaseException as error:
            with contextlib.suppress(Exception):
                # A model with parts of two versions refuses to run where requests cannot wait.
                if engine.stopped and (
                    not engine.requests_wait or await engine.ask(engine.label) != UNKNOWN
                ):
                    await engine.ask(engine.resume)
                    engine.stopped = False
            if first is None or not isinstance(error, Exception):
                raise
            raise RuntimeError(
                f"engine: expected to load version {version} at the second try, got {first}; "
                "update it again, or start a new one if it has ended: it answers nothing until "
                f"then if it calls its version {UNKNOWN!r}"
            ) from error
        finally:
            # An engine that does not hear it hears the next update.
            with contextlib.suppress(Exception):
                await self.tell(over=True)
        if first is not None and not isinstance(first, Exception):
            raise first  # an interrupt
        return version

    async def _lease(self, version: int, stays: bool) -> int:
        """Have the workers lease a version, or the newest if that is a later one; its number."""
        deadline = time.monotonic() + self._timeout + _PATIENCE
        asked = {"timeout": self._timeout, "server": self.engine.address, "stays": stays}
        while True:
            try:
                await self.tell(lease={"version": version, **asked})
                return version
            except Exception as error:
                former, version = version, max(version, self._source.version or 0)
                is_busy = BUSY in str(error)
                if time.monotonic() > deadline or not (is_busy or version > former):
                    raise
                if is_busy:
                    time.sleep(_AGAIN)

    async def tell(self, **message: Any) -> None:
        """Send the engine's workers a message about the channel.

        Its address is in each, as the engine may have been restarted, or read another channel.
        """
        await self.engine.ask(self.engine.tell, {"address": self._address, **message})


async def bring(engine: Engine, address: dict[str, Any], version: int, stays: bool) -> None:
    """Have an engine load what its workers have leased of a channel; may be called again.

    It stays paused afterwards, or goes on.
    """
    await engine.ask(engine.pause, "keep")
    if not await engine.ask(engine.drop_keys):
        raise RuntimeError(
            "engine: expected its KV cache and that of its connector to be dropped, got a refusal; "
            "its log says why, and the next update tries again"
        )
    await engine.ask(engine.drop_encoded)
    await engine.ask(engine.name, UNKNOWN)
    await engine.ask(engine.tell, {"address": address, "load": version})
    await engine.ask(engine.name, str(version))
    if not stays:
        await engine.ask(engine.resume)


async def to_its_end(work: Coroutine[Any, Any, Value]) -> Value:
    """Await work that must not be interrupted: cancellations take effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise


def run_calls(calls: Coroutine[Any, Any, Value]) -> Value:
    """Run a coroutine that never waits for an event loop, and return its result."""
    try:
        calls.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the calls of this engine wait for an event loop")
