"""The trainer's side: publishes weights, lets an engine load them, and knows its version."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from fusedrl.channel import WeightChannel
from fusedrl.channel.checks import seconds
from fusedrl.vllm.engines import InFlight, engine_of
from fusedrl.vllm.updates import Updates, to_its_end

# Held by an update of an engine, by the key of the engine, whatever channel it is from.
_TURNS: weakref.WeakValueDictionary[int | str, Any] = weakref.WeakValueDictionary()


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
            ``VLLM_SERVER_DEV_MODE=1``, whose workers call this address too; ``None`` on ranks of a
            sharded model whose end of the channel has no slots. It runs on this machine
            and was started with
            ``WeightTransferConfig(backend="fusedrl")``. An ``LLM`` takes calls of one thread at a
            time, so that no other thread may be within ``generate()`` during an update. Update an
            ``AsyncLLM`` with :meth:`update_async`.
        in_flight: what happens to running requests. With ``"recompute"`` they go on, and the keys
            and values of their tokens are computed again with the new weights. With ``"wait"`` the
            update begins when they have ended.
        timeout: seconds that the engine's workers wait for a version.

    Raises:
        TypeError: another kind of engine.
        ValueError: the engine was started without the backend.

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
        self.channel = channel
        timeout = seconds("timeout", timeout)
        self._updating = threading.Lock()
        self._updates = None
        if not channel.holds:
            if engine is not None:
                raise ValueError(
                    "engine: expected None on a rank without slots, got an engine, which could not "
                    "read them; pass the engine where channel.holds is true"
                )
            return
        called = engine_of(engine, timeout)
        self._updating = _TURNS.setdefault(called.key, self._updating)
        self._updates = Updates(
            channel.handle,
            lambda: channel.version,
            called,
            in_flight=in_flight,
            timeout=timeout,
        )

    @property
    def version(self) -> int | None:
        """The version that the engine has loaded last; ``None`` before the first."""
        return self.channel.version if self._updates is None else self._updates.version

    def update(self, weights: Any = None, version: int | None = None) -> int:
        """Publish weights, and wait until the engine has loaded them.

        Every rank of a sharded model calls this; an error of the engine is one on all ranks.

        Args:
            weights: as for :meth:`WeightChannel.publish`.
            version: as for :meth:`WeightChannel.publish`.

        Returns:
            The version that the engine has. It is a later one if another thread published in
            between.

        Raises:
            ValueError: the weights do not fit the channel, or the channel does not fit the engine's
                model. The engine goes on with the version that it has.
            RuntimeError: the engine refused, with its own message, and goes on with the version
                that it has. Or loading has failed twice, which the message says: the engine stays
                paused, or a ``vllm.LLM`` refuses to run, until an update succeeds.
            TypeError: the engine is an ``AsyncLLM``.
        """
        return self._load(partial(self._published, weights, version))

    def load(self) -> int:
        """Let the engine load what is published last, such as by the update of another engine.

        Returns, Raises: as :meth:`update`; ``RuntimeError`` also if nothing is published.
        """
        return self._load(self._newest)

    def _load(self, published: Callable[[], int]) -> int:
        with self._updating:
            if self._updates is not None:
                with self.channel.collective():  # or other ranks would wait for this one
                    self._updates.check_synchronous()
            version = published()
            with self.channel.collective():
                loaded = None if self._updates is None else self._updates.load(version)
                return self._agreed(loaded)

    async def update_async(self, weights: Any = None, version: int | None = None) -> int:
        """As :meth:`update`, in the event loop of an ``AsyncLLM``, which goes on meanwhile.

        A cancellation takes effect after the update that is running.
        """
        return await self._load_async(partial(self._published, weights, version))

    async def load_async(self) -> int:
        """As :meth:`load`, in the event loop of an ``AsyncLLM``."""
        return await self._load_async(self._newest)

    async def _load_async(self, publish: Callable[[], int]) -> int:
        await self._turn()
        try:
            published = await to_its_end(asyncio.to_thread(publish))
            with self.channel.collective():
                updates = self._updates
                loaded = None if updates is None else await updates.load_async(published)
                return await to_its_end(asyncio.to_thread(self._agreed, loaded))
        finally:
            self._updating.release()

    async def _turn(self) -> None:
        """Wait for the updates that began before this one."""
        turn = asyncio.ensure_future(asyncio.to_thread(self._updating.acquire))
        try:
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(lambda _: self._updating.release())
            raise

    def _published(self, weights: Any, version: int | None) -> int:
        return self.channel.publish(weights, version)

    def _newest(self) -> int:
        if (newest := self.channel.version) is None:
            raise RuntimeError(
                "version: expected a published one, got none; call update(), or publish() of the "
                "channel, first"
            )
        return newest

    def _agreed(self, loaded: int | None) -> int:
        loaded = self.channel.agreed(loaded)
        assert loaded is not None  # one rank has slots
        return loaded
