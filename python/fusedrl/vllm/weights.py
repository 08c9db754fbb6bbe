"""The trainer's side: publishes weights, and makes an engine load them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fusedrl.channel import WeightChannel
from fusedrl.channel.checks import seconds
from fusedrl.vllm.engines import InFlight, engine_of
from fusedrl.vllm.update import Update, run_calls, shielded

_POLL_S = 0.005  # between two attempts to begin while another update runs


class EngineWeights:
    """Loads the versions of a weight channel into a vLLM engine.

    An update that is refused leaves the engine unchanged. A load that fails midway is repeated; if
    that fails too, the engine keeps its version, or answers nothing until an update succeeds. The
    channel numbers the versions here, in the engine and in ``CompletionOutput.weight_versions``.

    Args:
        channel: a channel with the weights of the engine's model, under the names of its
            checkpoint; for a peft model, with ``merge_adapters=True``. It is not closed here.
        engine: a ``vllm.LLM``, an ``AsyncLLM``, or the address of a server that runs with
            ``VLLM_SERVER_DEV_MODE=1``, whose workers call this address too. It has to run on this
            machine, with ``WeightTransferConfig(backend="fusedrl")``. During an update, no other
            thread may be within ``generate()`` of an ``LLM``.
        in_flight: what happens to running requests. With ``"recompute"`` they continue, and the
            KV cache of their tokens is recomputed with the new weights. With ``"wait"`` the update
            begins when they have finished.
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
                "running requests continue, 'wait' lets them finish first"
            )
        if not channel.holds:
            raise ValueError(
                "channel: expected one with slots, got that of a rank without slots; call "
                "publish() on this rank, and update the engine where channel.holds is true"
            )
        timeout = seconds("timeout", timeout)
        self.channel = channel
        self._update = Update(engine_of(engine), channel.handle, channel, in_flight, timeout)

    @property
    def version(self) -> int | None:
        """The version that the engine loaded last, ``None`` before the first."""
        return self._update.version

    def update(self, weights: Any = None, version: int | None = None) -> int:
        """Publish weights, and wait until the engine has loaded them.

        Args:
            weights, version: as for :meth:`WeightChannel.publish`, which the other ranks of a
                sharded model call meanwhile.

        Returns:
            The version that the engine has: a later one if another thread published in between.

        Raises:
            ValueError, RuntimeError: the weights do not fit, the engine refuses them, or loading
                them has failed twice.
            TypeError: the engine is an ``AsyncLLM``.
        """
        return self._run(lambda: self.channel.publish(weights, version))

    def load(self) -> int:
        """Make the engine load the newest published version, such as one of another engine's
        update.

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
        """Like :meth:`update`, in the event loop of an ``AsyncLLM``, which keeps running meanwhile.

        A cancellation takes effect after the update that is running.
        """
        return await self._run_in_loop(lambda: self.channel.publish(weights, version))

    async def load_async(self) -> int:
        """Like :meth:`load`, in the event loop of an ``AsyncLLM``."""
        return await self._run_in_loop(lambda: self.channel.version)

    async def _run_in_loop(self, publish: Callable[[], int | None]) -> int:
        lock = self._update.engine.lock
        while not lock.acquire(blocking=False):  # waiting in a thread could not be cancelled
            await asyncio.sleep(_POLL_S)
        try:
            update = self._update.run(await shielded(asyncio.to_thread(publish)))
            if not self._update.engine.in_loop:
                update = shielded(asyncio.to_thread(run_calls, update))
            return await update
        finally:
            lock.release()
