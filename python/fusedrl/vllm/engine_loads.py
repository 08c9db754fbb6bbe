"""Let an engine load a version of a channel: the calls, in their order, and what undoes them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, cast

from fusedrl.channel import WeightHandle
from fusedrl.vllm.controls import AdapterControl, Control, InFlight, InLoop
from fusedrl.vllm.peft_models import PeftAdapters

# Others may publish between the choice of a version and the engine's lease, which is of the newest.
_TRIES = 20


class EngineLoads:
    """The updates of one engine from one channel.

    Args:
        handle: of the channel.
        newest: tells which version is published last.
        control: calls the engine.
        in_flight: as for :class:`~fusedrl.vllm.EngineWeights`.
        socket: path of the Unix socket that passes the channel, if the handle alone does not do.
        timeout: seconds that the engine's workers wait for a version.
        adapters: of a channel with adapters alone; ``control`` is an ``AdapterControl`` then.

    Attributes:
        version: that the engine was given last; ``None`` before the first.
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

    def check_synchronous(self) -> None:
        """Raise ``TypeError`` for an engine that is called in an event loop."""
        if isinstance(self._control, InLoop):
            raise TypeError(
                "engine: expected a vllm.LLM or a server, got an AsyncLLM, which is called in its "
                "event loop; await update_async() there"
            )

    def load(self, version: int) -> int:
        """Load a published version, or a later one; returns which.

        Raises:
            ValueError, RuntimeError: the engine's workers refused, or an engine in another process
                did; the engine goes on with the version that it has.
            TypeError: an engine that is called in an event loop.
        """
        self.check_synchronous()
        return _run(self._load(version))

    async def load_async(self, version: int) -> int:
        """As :meth:`load`, of any engine."""
        if isinstance(self._control, InLoop):
            return await self._load(version)
        return await asyncio.to_thread(_run, self._load(version))

    async def _load(self, version: int) -> int:
        await self._control.pause(self._in_flight)
        try:
            self.version = await self._load_paused(version)
            await self._control.forget()
        finally:
            await self._control.resume()
        return self.version

    async def _load_paused(self, version: int) -> int:
        for _ in range(_TRIES):
            try:
                if self._adapters is None:
                    await self._load_weights(version)
                else:
                    await self._load_adapters(version, self._adapters)
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

    async def _load_weights(self, version: int) -> None:
        try:
            await self._control.start()
        except Exception:
            # Somebody began an update and did not end it.
            await self._finish_failed()
            await self._control.start()
        try:
            # With the address, as the engine may have been restarted, or read another channel.
            await self._control.load(
                {"version": version, "timeout": self._timeout, "channel": self._address}
            )
        except Exception:
            if await self._control.workers() > 1:
                await self._finish_failed()
            raise
        await self._control.finish(str(version))

    async def _load_adapters(self, version: int, adapters: PeftAdapters) -> None:
        control = cast("AdapterControl", self._control)
        update = {
            "version": version,
            "timeout": self._timeout,
            "number": adapters.number,
            "scalings": adapters.scalings,
        }
        await control.load_adapters({**self._address, "adapters": update})
        await control.number(str(version))

    async def _finish_failed(self) -> None:
        # Of several workers only the last one has ended the update that failed; it refuses this.
        with contextlib.suppress(Exception):
            await self._control.finish(None)


def _run(calls: Coroutine[Any, Any, int]) -> int:
    """What a coroutine returns that never waits for an event loop."""
    try:
        calls.send(None)
    except StopIteration as done:
        return done.value
    calls.close()
    raise RuntimeError("engine: expected calls that return, got one for an event loop")
