"""The trainer's side: publish, let an engine load it, and know which version it has."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import threading
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fusedrl.channel import WeightChannel
from fusedrl.channel.checks import seconds
from fusedrl.channel.forking import renew_in_children
from fusedrl.vllm.controls import InFlight, control_of
from fusedrl.vllm.engine_loads import EngineLoads, to_its_end
from fusedrl.vllm.passing import ChannelSocket
from fusedrl.vllm.peft_models import PeftAdapters

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class EngineWeights:
    """Keeps a vLLM engine at the versions of a weight channel.

    An update is complete or has not been: the engine's workers lease one version, all the same one,
    before anything of the model is touched. Its number is the channel's everywhere: in the engine,
    in ``CompletionOutput.weight_versions`` of each request, and here.

    Args:
        channel: of the weights of the engine's model, under the names of its checkpoint; or, with
            ``adapters="only"``, of its LoRA adapters alone, for requests that pass
            :attr:`lora_request`. Whoever made it closes it.
        engine: a ``vllm.LLM``, which takes calls of one thread at a time, so that no other may be
            within ``generate()`` during an update; an ``AsyncLLM``, whose updates are
            :meth:`update_async`; or the address of a server that runs with
            ``VLLM_SERVER_DEV_MODE=1``. It was started with
            ``WeightTransferConfig(backend="fusedrl")``, on the machine of this process; for
            adapters with ``enable_lora=True`` and their ``max_lora_rank``, and not a server.
        in_flight: what becomes of requests that are running. ``"recompute"``: they go on, with the
            keys and values of their tokens computed again by the new weights. ``"wait"``: the
            update begins when they have ended.
        socket: path for a Unix socket, for an engine that sees other pids than this process
            (containers on one machine, which share its folder).
        timeout: seconds that the engine's workers wait for a version.

    Raises:
        TypeError: another kind of engine, or a server for adapters alone.
        ValueError: an engine that was started without the backend; adapters that vLLM has not got,
            such as DoRA, with what is wrong with them.

    Example:
        >>> from fusedrl import WeightChannel
        >>> from fusedrl.vllm import EngineWeights
        >>> def train(model, llm, steps):  # llm = LLM(..., weight_transfer_config=...)
        ...     with WeightChannel.create(model) as channel, EngineWeights(channel, llm) as weights:
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
        socket: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        if in_flight not in ("recompute", "wait"):
            raise ValueError(f"in_flight: expected 'recompute' or 'wait', got {in_flight!r}")
        self.channel = channel
        timeout = seconds("timeout", timeout)
        self._updating = threading.Lock()
        renew_in_children(self, _updating=threading.Lock)
        self._adapters = PeftAdapters(channel) if channel.layout.adapters == "only" else None
        if self._adapters is not None and isinstance(engine, str):
            raise TypeError(
                "engine: expected a vllm.LLM or an AsyncLLM for a channel with adapters='only', "
                "got the address of a server, whose requests name adapters by their files; create "
                "the channel with adapters='merged'"
            )
        control = control_of(engine, timeout)
        self._socket = None if socket is None else ChannelSocket(channel, socket)
        self._loads = EngineLoads(
            channel.handle,
            lambda: channel.version,
            control,
            in_flight=in_flight,
            socket=socket,
            timeout=timeout,
            adapters=self._adapters,
        )

    @property
    def version(self) -> int | None:
        """The version that the engine was given last; ``None`` before the first."""
        return self._loads.version

    @property
    def lora_request(self) -> LoRARequest | None:
        """What requests pass as ``lora_request`` to be answered by the channel's weights.

        ``None`` for a channel with all weights of a model, which answer every request. It names
        adapters in the engine's memory, and may be kept: each version takes the place of the last.

        Raises:
            RuntimeError: adapters that the engine has not been given yet. Requests must not name
                them before, nor after vLLM has dropped them, which it does with all adapters when
                its own weights are updated: it would look for a file, and end.
        """
        if self._adapters is None:
            return None
        if self.version is None:
            raise RuntimeError(
                "lora_request: expected adapters that the engine has, got none; call update() first"
            )
        from vllm.lora.request import LoRARequest

        # Absolute, or vLLM would ask the hub for it.
        return LoRARequest(self._adapters.name, self._adapters.number, f"/{self._adapters.name}")

    def update(self, weights: Any = None, version: int | None = None) -> int:
        """Publish weights, and let the engine load them.

        Args:
            weights: as for :meth:`WeightChannel.publish`.
            version: as for :meth:`WeightChannel.publish`.

        Returns:
            The version that the engine has: a later one than was published, if another thread
            published in between.

        Raises:
            ValueError: weights that do not fit the channel, or a channel that does not fit the
                engine's model. The engine goes on with the version that it has.
            RuntimeError: the engine refused; the message is the engine's. It goes on with the
                version that it has, unless a note of the error says that it may have parts of two:
                then it stays paused, or a ``vllm.LLM`` refuses to run, until an update succeeds.
            TypeError: an ``AsyncLLM``.
        """
        self._loads.check_synchronous()
        with self._updating:
            return self._loads.load(self._published(weights, version))

    async def update_async(self, weights: Any = None, version: int | None = None) -> int:
        """As :meth:`update`, in the event loop of an ``AsyncLLM``, which goes on meanwhile.

        A cancellation takes effect when the engine is through with the update that goes on.
        """
        await self._turn()
        try:
            published = await to_its_end(asyncio.to_thread(self._published, weights, version))
            return await self._loads.load_async(published)
        finally:
            self._updating.release()

    async def _turn(self) -> None:
        """Wait for the updates that came before."""
        turn = asyncio.ensure_future(asyncio.to_thread(self._updating.acquire))
        try:
            await asyncio.shield(turn)
        except asyncio.CancelledError:
            turn.add_done_callback(lambda _: self._updating.release())
            raise

    def _published(self, weights: Any, version: int | None) -> int:
        if self._adapters is not None:
            self._adapters.read(weights)
        published = self.channel.publish(weights, version)
        assert published is not None  # on_full="block"
        return published

    def close(self) -> None:
        """Let go of the engine, which keeps the version that it has."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> EngineWeights:
        """This."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close it."""
        self.close()
