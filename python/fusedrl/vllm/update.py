"""One update of an engine: its calls, which are repeated after a failure, not undone."""

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

# The label of an engine, instead of a version, while its weights are not known.
UNKNOWN = "unknown"
# A server's answer while another trainer updates it, or while it recovers from one that ended.
BUSY = "update: expected no other update at the same time"
# Seconds until a busy server is called again, and after which it is no longer called.
_RETRY_S, _BUSY_TIMEOUT = 0.5, 60.0

logger = logging.getLogger("fusedrl")


class Update:
    """Updates one engine from one channel; each :meth:`run` is an update, within ``engine.lock``.

    Args:
        engine, handle: the engine, and the channel's handle.
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
        self.version: int | None = None  # that was loaded last
        self._address = asdict(handle)
        self._source = source
        self._in_flight = in_flight
        self._timeout = timeout

    async def run(self, version: int | None) -> int:
        """Load a published version, or a later one, and return its number.

        First the workers lease it: anything that can be refused is refused here, without a change.
        Then :func:`load_leased` changes the engine, and is repeated if it fails, as the workers
        still have the lease. If it fails again, the engine continues with its previous version, if
        it still has that, or is labelled "unknown" and answers nothing until an update succeeds.
        """
        engine, first = self.engine, None
        if version is None:
            raise RuntimeError("version: expected a published one, got none; call update() first")
        engine.loaded, engine.timeout = None, self._timeout
        is_paused = not engine.stopped and await engine.ask(engine.is_paused)
        # By the user, rather than by an update that failed.
        stays = is_paused and await engine.ask(engine.label) != UNKNOWN
        try:
            version = await self._lease(version, stays)
            engine.stopped = not stays
            if self._in_flight == "wait":
                await engine.ask(engine.pause, "wait")
            for is_last in (False, True):
                try:
                    calls = load_leased(engine, self._address, version, stays)
                    await (shielded(calls) if engine.in_loop else calls)
                    break
                except BaseException as error:
                    if is_last:
                        raise
                    first = error
                    logger.warning("update: loading version %s again, after %r", version, error)
            self.version, engine.stopped = version, False
            engine.loaded = self._address["session"], version
        except BaseException as error:
            with contextlib.suppress(Exception):
                # Where requests cannot wait, a model with parts of two versions refuses to run.
                if engine.stopped and (
                    not engine.requests_wait or await engine.ask(engine.label) != UNKNOWN
                ):
                    await engine.ask(engine.resume)
                    engine.stopped = False
            if first is None or not isinstance(error, Exception):
                raise
            raise RuntimeError(
                f"engine: expected to load version {version} at the second try, got {first}; "
                "update it again, or start a new one if it has ended; it answers nothing while "
                f"its version is {UNKNOWN!r}"
            ) from error
        finally:
            # If this is lost, the next update ends this one.
            with contextlib.suppress(Exception):
                await self.send(over=True)
        if first is not None and not isinstance(first, Exception):
            raise first  # an interrupt
        return version

    async def _lease(self, version: int, stays: bool) -> int:
        """Make the workers lease a version, or the newest if it is later; returns its number."""
        deadline = time.monotonic() + self._timeout + _BUSY_TIMEOUT
        options = {"timeout": self._timeout, "server": self.engine.address, "stays": stays}
        while True:
            try:
                await self.send(lease={"version": version, **options})
                return version
            except Exception as error:
                former, version = version, max(version, self._source.version or 0)
                is_busy = BUSY in str(error)
                if time.monotonic() > deadline or not (is_busy or version > former):
                    raise
                if is_busy:
                    time.sleep(_RETRY_S)

    async def send(self, **message: Any) -> None:
        """Send the engine's workers a message about the channel.

        It includes the channel's address: the engine may have restarted, or read another channel.
        """
        await self.engine.ask(self.engine.send, {"address": self._address, **message})


async def load_leased(engine: Engine, address: dict[str, Any], version: int, stays: bool) -> None:
    """Make an engine load the version that its workers have leased; may be called again.

    ``address`` has the fields of the channel's handle. The engine is resumed unless it ``stays``.
    """
    await engine.ask(engine.pause, "keep")
    if not await engine.ask(engine.reset_kv_cache):
        raise RuntimeError(
            "engine: expected its KV cache and that of its connector to be reset, got a refusal; "
            "see its log, and update again"
        )
    await engine.ask(engine.reset_encoder_cache)
    await engine.ask(engine.set_label, UNKNOWN)
    await engine.ask(engine.send, {"address": address, "load": version})
    await engine.ask(engine.set_label, str(version))
    if not stays:
        await engine.ask(engine.resume)


async def shielded(work: Coroutine[Any, Any, Value]) -> Value:
    """Await work that must not be interrupted; a cancellation takes effect afterwards."""
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
