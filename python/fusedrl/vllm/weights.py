"""The trainer's side: publishes weights, lets an engine load them, and knows its version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fusedrl.channel import WeightChannel
from fusedrl.channel.checks import seconds
from fusedrl.vllm.engines import InFlight, engine_of
from fusedrl.vllm.update import Update, run_calls, to_its_end

_LOOK_S = 0.005  # between two looks at whether another update in the event loop has ended


class EngineWeights:
    """Keeps a vLLM engine at the versions of a weight channel.

    What is refused leaves the engine as it is. A load that fails in its middle is repeated, and if
    that fails too, the engine answers nothing until an update succeeds. The number of the version
    is the channel's everywhere: in the engine, in ``CompletionOutput.weight_versions`` of each
    request, and here.

    Args:
        channel: a channel with the weights of the engine's model, under the names of its
            checkpoint: that of a peft model with ``merge_adapters=True``. It is not closed here.
        engine: a ``vllm.LLM``, an ``AsyncLLM``, or the address of a server that runs with
            ``VLLM_SERVER_DEV_MODE=1``, whose workers call this address too. It runs on this machine
            and was started with ``WeightTransferConfig(backend="fusedrl")``. No other thread may be
            within ``generate()`` of an ``LLM`` during an update.
        in_flight: what happens to running requests. With ``"recompute"`` they go on, and the keys
            and values of their tokens are computed again with the new weights. With ``"wait"`` the
            update begins when they have ended.
        timeout: seconds that the engine's workers wait for a version.

    Raises:
        TypeError: another kind of engine.
        ValueError: the engine was started without the backend, or this rank of a sharded model has
            no slots.

    Example:
        >>> from fusedrl import WeightChannel
        >>> from fusedrl.vllm import EngineWeights
        >>> def train(model, llm, steps):  # llm = LLM(..., weight_transfer_config=...)
        ...     with WeightChannel.create(model) as channel:
        ...         weights = EngineWeights(channel, llm)
        ...         for step in range(steps):
        ...             version = weights.update()
        ...             rollouts = llm.generate(...)
    """

    def __init__(
        self,
        channel: WeightChannel,
        engine: Any,
        *,
        in_flight: InFlight = "recompute",
        timeout: float = 60.0,
    ) -> None:
        if in_flight not in ("recompute", "wait"):
            raise ValueError(
                f"in_flight: expected 'recompute' or 'wait', got {in_flight!r}; 'recompute' lets "
                "running requests go on, 'wait' lets them end first"
            )
        if not channel.holds:
            raise ValueError(
                "channel: expected one with slots, got that of another rank of a sharded model; "
                "call publish() there, and update the engine where channel.holds is true"
            )
        timeout = seconds("timeout", timeout)
        self.channel = channel
        self._update = Update(engine_of(engine), channel.handle, channel, in_flight, timeout)

    @property
    def version(self) -> int | None:
        """The version that the engine has loaded last; ``None`` before the first."""
        return self._update.version

    def update(self, weights: Any = None, version: int | None = None) -> int:
        """Publish weights, and wait until the engine has loaded them.

        Args:
            weights, version: as for :meth:`WeightChannel.publish`, which the other ranks of a
                sharded model call meanwhile.

        Returns:
            The version that the engine has: a later one if another thread published in between.

        Raises:
            ValueError, RuntimeError: weights that do not fit, the engine refused, or it has failed
                to load them twice, which the message says.
            TypeError: the engine is an ``AsyncLLM``.
        """
        return self._run(lambda: self.channel.publish(weights, version))

    def load(self) -> int:
        """Let the engine load what is published last, such as by the update of another engine.

        Returns, Raises: as :meth:`update`; ``RuntimeError`` also if nothing is published.
        """
        return self._run(lambda: self.channel.version)

    def _run(self, publish: Callable[[], int | None]) -> int:
        if self._update.engine.in_loop:
            raise TypeError(
                "engine: expected a vllm.LLM or a server, got an AsyncLLM, which is called in its "
                "event loop; await update_async() there"
            )
        with self._update.engine.lock:
            return run_calls(self._update.run(publish()))

    async def update_async(self, weights: Any = None, version: int | None = None) -> int:
        """As :meth:`update`, in the event loop of an ``AsyncLLM``, which goes on meanwhile.

        A cancellation takes effect after the update that is running.
        """
        return await self._run_in_loop(lambda: self.channel.publish(weights, version))

    async def load_async(self) -> int:
        """As :meth:`load`, in the event loop of an ``AsyncLLM``."""
        return await self._run_in_loop(lambda: self.channel.version)

    async def _run_in_loop(self, publish: Callable[[], int | None]) -> int:
        lock = self._update.engine.lock
        while not lock.acquire(blocking=False):  # a thread that waits for it could not be cancelled
            await asyncio.sleep(_LOOK_S)
        try:
            update = self._update.run(await to_its_end(asyncio.to_thread(publish)))
            if not self._update.engine.in_loop:
                update = to_its_end(asyncio.to_thread(run_calls, update))
            return await update
        finally:
            lock.release()
