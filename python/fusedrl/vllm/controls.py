"""How a trainer calls an engine: in its own process, in an event loop, or over HTTP."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any, Literal, Protocol

InFlight = Literal["recompute", "wait"]


class Control(Protocol):
    """The calls of an engine that an update takes.

    They are coroutines for the sake of ``AsyncLLM``; those of the others never wait for anything
    but the engine, in the thread that calls.
    """

    async def workers(self) -> int:
        """How many hold the model together."""
        ...

    async def pause(self, in_flight: InFlight) -> None:
        """Let no request go on, but those that ``"wait"`` is for."""
        ...

    async def resume(self) -> None:
        """Let requests go on."""
        ...

    async def start(self) -> None:
        """Begin an update."""
        ...

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        ...

    async def finish(self, version: str | None) -> None:
        """End an update; the engine's weights have this number."""
        ...

    async def forget(self) -> None:
        """Drop all that was computed with the former weights, of running requests too."""
        ...


class AdapterControl(Control, Protocol):
    """The calls of an engine whose requests can name adapters that no file has."""

    async def load_adapters(self, info: dict[str, Any]) -> None:
        """Load a version of adapters."""
        ...

    async def number(self, version: str) -> None:
        """The engine's weights have this number."""
        ...


def control_of(engine: Any, timeout: float) -> Control:
    """What controls an engine.

    Args:
        engine: a ``vllm.LLM``, an ``AsyncLLM``, or the address of a server.
        timeout: seconds for a call of a server.

    Raises:
        TypeError: something else.
    """
    if isinstance(engine, str):
        return Server(engine, timeout)
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    if isinstance(engine, LLM):
        return Offline(engine)
    if isinstance(engine, AsyncLLM):
        return InLoop(engine)
    raise TypeError(
        "engine: expected a vllm.LLM, a vllm.v1.engine.async_llm.AsyncLLM or the address of a "
        f"server, such as 'http://localhost:8000', got {type(engine).__name__}"
    )


class Offline:
    """A ``vllm.LLM``: between two of its calls no request runs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def workers(self) -> int:
        """How many hold the model together."""
        return self._engine.llm_engine.vllm_config.parallel_config.world_size

    async def pause(self, in_flight: InFlight) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing was stopped."""

    async def start(self) -> None:
        """Begin an update."""
        self._engine.start_weight_update()

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        self._engine.update_weights({"update_info": info})

    async def finish(self, version: str | None) -> None:
        """End an update; the engine's weights have this number."""
        self._engine.finish_weight_update(version)

    async def load_adapters(self, info: dict[str, Any]) -> None:
        """Load a version of adapters."""
        self._engine.init_weight_transfer_engine({"init_info": info})

    async def number(self, version: str) -> None:
        """The engine's weights have this number."""
        self._engine.llm_engine.set_weight_version(version)

    async def forget(self) -> None:
        """Drop all that was computed with the former weights."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.llm_engine.reset_encoder_cache()


class InLoop:
    """An ``AsyncLLM``, within the event loop that it runs in."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def workers(self) -> int:
        """How many hold the model together."""
        return self._engine.vllm_config.parallel_config.world_size

    async def pause(self, in_flight: InFlight) -> None:
        """Let no request go on, but those that ``"wait"`` is for."""
        mode = "keep" if in_flight == "recompute" else "wait"
        await self._engine.pause_generation(mode=mode, clear_cache=False)

    async def resume(self) -> None:
        """Let requests go on."""
        await self._engine.resume_generation()

    async def start(self) -> None:
        """Begin an update."""
        await self._engine.start_weight_update()

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(WeightTransferUpdateRequest(update_info=info))

    async def finish(self, version: str | None) -> None:
        """End an update; the engine's weights have this number."""
        await self._engine.finish_weight_update(version)

    async def load_adapters(self, info: dict[str, Any]) -> None:
        """Load a version of adapters."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def number(self, version: str) -> None:
        """The engine's weights have this number."""
        await self._engine.update_weight_version(version)

    async def forget(self) -> None:
        """Drop all that was computed with the former weights, of running requests too."""
        await self._engine.reset_prefix_cache(reset_running_requests=True)
        await self._engine.reset_encoder_cache()


class Server:
    """A server that runs with ``VLLM_SERVER_DEV_MODE=1``, which these calls take.

    Args:
        address: ``http://host:port``.
        timeout: seconds for a call.
    """

    def __init__(self, address: str, timeout: float) -> None:
        self._address = address.rstrip("/")
        self._timeout = timeout

    async def workers(self) -> int:
        """How many hold the model together."""
        return json.loads(self._call("GET", "get_world_size?include_dp=false"))["world_size"]

    async def pause(self, in_flight: InFlight) -> None:
        """Let no request go on, but those that ``"wait"`` is for."""
        mode = "keep" if in_flight == "recompute" else "wait"
        self._post(f"pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        """Let requests go on."""
        self._post("resume")

    async def start(self) -> None:
        """Begin an update."""
        self._post("start_weight_update")

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        self._post("update_weights", {"update_info": info})

    async def finish(self, version: str | None) -> None:
        """End an update; the engine's weights have this number."""
        self._post("finish_weight_update", {"weight_version": version})

    async def forget(self) -> None:
        """Drop all that was computed with the former weights, of running requests too."""
        self._post("reset_prefix_cache?reset_running_requests=true")
        self._post("reset_encoder_cache")

    def _post(self, path: str, fields: dict[str, Any] | None = None) -> None:
        self._call("POST", path, b"" if fields is None else json.dumps(fields).encode())

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(
            f"{self._address}/{path}",
            data=data,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:2000]
            remedy = (
                "start it with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else "its log says more"
            )
            raise RuntimeError(
                f"engine: expected {self._address}/{path.partition('?')[0]} to succeed, got "
                f"{error.code}: {text or error.reason}; {remedy}"
            ) from error
        except OSError as error:
            raise RuntimeError(
                f"engine: expected a server at {self._address}, got {error}; start it first, with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """What a server says of a call that failed."""
    if error.code == 404:
        return "no such call; start the server with VLLM_SERVER_DEV_MODE=1"
    text = error.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:2000] or error.reason
