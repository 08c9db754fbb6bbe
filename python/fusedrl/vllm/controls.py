"""How a trainer calls an engine: in its own process, in an event loop, or over HTTP."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Literal, Protocol, TypeVar

from fusedrl.vllm.plugin import BACKEND

Value = TypeVar("Value")
InFlight = Literal["recompute", "wait"]
# The label of tokens whose weights are not known, in the place of a version.
UNKNOWN = "unknown"
# A server's answer while another trainer updates it, or while it recovers from one that ended.
BUSY = "update: expected no other one at the same time"
# Seconds that workers have for loading a version, or for finding out that it does not exist.
_LOADING = 60.0
# Seconds within which the end of an engine is noticed.
_ALIVE = 0.5
# Seconds in which a server says whether its engine runs.
_HEALTH = 5.0
_ENDED = "engine: expected one that runs, got one that has ended during the call; its log says why"


class Control(Protocol):
    """The calls of an engine that an update consists of.

    They are coroutines because those of ``AsyncLLM`` are. Those of other engines block the calling
    thread until the engine has answered, and never wait for an event loop.

    Attributes:
        key: identifies the engine for as long as this object exists.
    """

    key: int | str

    async def paused(self) -> bool:
        """Whether somebody has paused the engine."""
        ...

    async def hold(self, info: dict[str, Any]) -> None:
        """Let the engine go on by itself should this process end before it lets it go on.

        Args:
            info: what ``ChannelWeightTransferEngine.init_transfer_engine`` takes, with ``"hold"``.
        """
        ...

    async def label(self) -> str:
        """The name that the engine gives its weights."""
        ...

    async def pause(self, in_flight: InFlight) -> None:
        """Pause all requests, or with ``"wait"`` let running ones end and start no others."""
        ...

    async def resume(self) -> None:
        """Let requests go on."""
        ...

    async def withhold(self) -> None:
        """Keep an engine whose weights are labelled as unknown from answering with a mixture."""
        ...

    async def init(self, info: dict[str, Any]) -> None:
        """Tell the workers what ``ChannelWeightTransferEngine.init_transfer_engine`` takes."""
        ...

    async def start(self) -> None:
        """Begin an update."""
        ...

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        ...

    async def finish(self, version: str | None) -> None:
        """End an update, after which the engine's weights have this number."""
        ...

    async def number(self, version: str) -> None:
        """Give the engine's weights this number, without an update."""
        ...

    async def forget(self) -> None:
        """Drop everything computed with the former weights, that of running requests included."""
        ...


def control_of(engine: Any, timeout: float) -> Control:
    """The object that calls an engine.

    Args:
        engine: a ``vllm.LLM``, an ``AsyncLLM``, or the address of a server.
        timeout: seconds that a server's workers wait for a version.

    Raises:
        TypeError: ``engine`` is something else.
        ValueError: ``engine`` is a string but no address, or an engine in this process that was
            started without the backend.
    """
    if isinstance(engine, str):
        return Server(engine, timeout + _LOADING)
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    if isinstance(engine, LLM):
        _check_backend(engine.llm_engine.vllm_config)
        return Offline(engine)
    if isinstance(engine, AsyncLLM):
        _check_backend(engine.vllm_config)
        return InLoop(engine)
    raise TypeError(
        "engine: expected a vllm.LLM, a vllm.v1.engine.async_llm.AsyncLLM or the address of a "
        f"server, such as 'http://localhost:8000', got {type(engine).__name__}; pass the engine "
        "itself, not what is around it"
    )


def _check_backend(vllm_config: Any) -> None:
    transfer = vllm_config.weight_transfer_config
    backend = None if transfer is None else transfer.backend
    if backend != BACKEND:
        raise ValueError(
            f"engine: expected one with backend={BACKEND!r}, got backend={backend!r}; start it "
            f"with weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
        )


def _in_thread(call: Callable[[], Value]) -> Future[Value]:
    """Call an engine where nothing ends a call that it does not answer."""
    answer: Future[Value] = Future()

    def wait() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=wait, name="fusedrl-engine-call", daemon=True).start()
    return answer


def _check_dropped(dropped: Any) -> None:
    if not dropped:
        raise RuntimeError(
            "engine: expected its KV cache and that of its connector to be dropped, got a refusal; "
            "its log says why, and the next update tries again"
        )


class Offline:
    """A ``vllm.LLM``, which may have requests that run by calls of ``llm_engine.step()``."""

    def __init__(self, engine: Any) -> None:
        self.key: int | str = id(engine)
        self._engine = engine

    async def paused(self) -> bool:
        """Return ``False``: nobody pauses it, since ``generate()`` would then wait for ever."""
        return False

    async def hold(self, info: dict[str, Any]) -> None:
        """Do nothing: the engine ends with this process."""

    async def label(self) -> str:
        """The name that the engine gives its weights."""
        return self._call(self._engine.get_weight_version)

    async def pause(self, in_flight: InFlight) -> None:
        """Pause all requests, or with ``"wait"`` let running ones end and start no others."""
        mode = "keep" if in_flight == "recompute" else "wait"
        self._call(lambda: self._engine.sleep(level=0, mode=mode))

    async def resume(self) -> None:
        """Let requests go on."""
        self._call(lambda: self._engine.wake_up(tags=["scheduling"]))

    async def withhold(self) -> None:
        """Let requests go on, of which a model with parts of two versions answers none."""
        await self.forget()
        await self.resume()

    async def init(self, info: dict[str, Any]) -> None:
        """Tell the workers which channel to read, or what to check."""
        self._call(lambda: self._engine.init_weight_transfer_engine({"init_info": info}))

    async def start(self) -> None:
        """Begin an update."""
        self._call(self._engine.start_weight_update)

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        self._call(lambda: self._engine.update_weights({"update_info": info}))

    async def finish(self, version: str | None) -> None:
        """End an update, after which the engine's weights have this number."""
        self._call(lambda: self._engine.finish_weight_update(version))

    async def number(self, version: str) -> None:
        """Give the engine's weights this number, without an update."""
        self._call(lambda: self._engine.update_weight_version(version))

    async def forget(self) -> None:
        """Drop everything computed with the former weights, that of running requests included."""
        _check_dropped(
            self._call(lambda: self._engine.reset_prefix_cache(True, reset_connector=True))
        )
        self._call(self._engine.llm_engine.reset_encoder_cache)

    def _call(self, call: Callable[[], Any]) -> Any:
        """Call the engine, and raise if it has ended, where vLLM would wait for ever."""
        client = self._engine.llm_engine.engine_core
        resources = getattr(client, "resources", None)
        if resources is None:  # an engine in this process
            return call()
        answer = _in_thread(call)
        while not wait_for([answer], timeout=_ALIVE).done:
            if resources.engine_dead or not client._finalizer.alive:
                raise RuntimeError(_ENDED)
        return answer.result()


class InLoop:
    """An ``AsyncLLM``, called within the event loop that it runs in."""

    def __init__(self, engine: Any) -> None:
        self.key: int | str = id(engine)
        self._engine = engine

    async def paused(self) -> bool:
        """Whether somebody has paused the engine."""
        return await self._engine.is_paused()

    async def hold(self, info: dict[str, Any]) -> None:
        """Do nothing: the engine ends with this process."""

    async def label(self) -> str:
        """The name that the engine gives its weights."""
        return await self._call(self._engine.get_weight_version())

    async def pause(self, in_flight: InFlight) -> None:
        """Pause all requests, or with ``"wait"`` let running ones end and start no others."""
        mode = "keep" if in_flight == "recompute" else "wait"
        await self._call(self._engine.pause_generation(mode=mode, clear_cache=False))

    async def resume(self) -> None:
        """Let requests go on."""
        await self._call(self._engine.resume_generation())

    async def withhold(self) -> None:
        """Leave the engine paused."""

    async def init(self, info: dict[str, Any]) -> None:
        """Tell the workers which channel to read, or what to check."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=info)
        await self._call(self._engine.init_weight_transfer_engine(request))

    async def start(self) -> None:
        """Begin an update."""
        await self._call(self._engine.start_weight_update())

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        request = WeightTransferUpdateRequest(update_info=info)
        await self._call(self._engine.update_weights(request))

    async def finish(self, version: str | None) -> None:
        """End an update, after which the engine's weights have this number."""
        await self._call(self._engine.finish_weight_update(version))

    async def number(self, version: str) -> None:
        """Give the engine's weights this number, without an update."""
        await self._call(self._engine.update_weight_version(version))

    async def forget(self) -> None:
        """Drop everything computed with the former weights, that of running requests included."""
        _check_dropped(
            await self._call(self._engine.reset_prefix_cache(True, reset_connector=True))
        )
        await self._call(self._engine.reset_encoder_cache())

    async def _call(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Await a call, and raise if the engine has ended, where vLLM would wait for ever."""
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=_ALIVE))[0]:
                if self._engine.errored:
                    raise RuntimeError(_ENDED)
        except BaseException:
            task.cancel()
            raise
        return task.result()


class Server:
    """A server that runs with ``VLLM_SERVER_DEV_MODE=1``, which these calls need.

    Args:
        address: ``http://host:port``.
        timeout: seconds for a call.
    """

    def __init__(self, address: str, timeout: float) -> None:
        if not address.startswith(("http://", "https://")):
            raise ValueError(
                f"engine: expected an address such as 'http://localhost:8000', got {address!r}; "
                "begin it with http:// or https://"
            )
        self._address = address.rstrip("/")
        self.key: int | str = self._address
        self._timeout = timeout

    async def paused(self) -> bool:
        """Whether somebody has paused the engine."""
        return json.loads(self._call("GET", "is_paused"))["is_paused"]

    async def hold(self, info: dict[str, Any]) -> None:
        """Let the engine go on by itself should this process end; wait for other updates first."""
        info = {**info, "hold": {**info["hold"], "server": self._address}}
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                return self._post("init_weight_transfer_engine", {"init_info": info})
            except RuntimeError as error:
                if BUSY not in str(error) or time.monotonic() > deadline:
                    raise
            time.sleep(_ALIVE)

    async def label(self) -> str:
        """The name that the engine gives its weights."""
        return json.loads(self._call("GET", "weight_info"))["weight_version"]

    async def pause(self, in_flight: InFlight) -> None:
        """Pause all requests, or with ``"wait"`` let running ones end and start no others."""
        mode = "keep" if in_flight == "recompute" else "wait"
        self._post(f"pause?mode={mode}&clear_cache=false")

    async def resume(self) -> None:
        """Let requests go on."""
        self._post("resume")

    async def withhold(self) -> None:
        """Leave the engine paused."""

    async def init(self, info: dict[str, Any]) -> None:
        """Tell the workers which channel to read, or what to check."""
        self._post("init_weight_transfer_engine", {"init_info": info})

    async def start(self) -> None:
        """Begin an update."""
        self._post("start_weight_update")

    async def load(self, info: dict[str, Any]) -> None:
        """Load a version."""
        self._post("update_weights", {"update_info": info})

    async def finish(self, version: str | None) -> None:
        """End an update, after which the engine's weights have this number."""
        self._post("finish_weight_update", {"weight_version": version})

    async def number(self, version: str) -> None:
        """Give the engine's weights this number, without an update."""
        self._post("update_weight_version", {"new_version": version})

    async def forget(self) -> None:
        """Drop everything computed with the former weights, that of running requests included."""
        answer = self._call(
            "POST", "reset_prefix_cache?reset_running_requests=true&reset_external=true", b""
        )
        _check_dropped(json.loads(answer)["success"])
        self._post("reset_encoder_cache")

    def _post(self, path: str, fields: dict[str, Any] | None = None) -> None:
        self._call("POST", path, b"" if fields is None else json.dumps(fields).encode())

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Call the server, and raise if its engine has ended, where it would wait for ever."""
        answer = _in_thread(lambda: self._answer(method, path, data))
        while not wait_for([answer], timeout=_ALIVE).done:
            if not self._is_healthy() and not wait_for([answer], timeout=_ALIVE).done:
                raise RuntimeError(
                    f"engine: expected one that runs behind {self._address}, got a server whose "
                    "engine has ended; its log says why: start it again"
                )
        return answer.result()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._address}/health", timeout=_HEALTH):
                return True
        except TimeoutError:
            return True  # busy
        except (OSError, http.client.HTTPException) as error:
            return isinstance(getattr(error, "reason", None), TimeoutError)

    def _answer(self, method: str, path: str, data: bytes | None) -> bytes:
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
            raise RuntimeError(
                f"engine: expected {self._address}/{path.partition('?')[0]} to succeed, got "
                f"{error.code}: {_reason(error)}; the server's log says more"
            ) from error
        except TimeoutError as error:
            raise TimeoutError(
                f"engine: expected {self._address} to answer within {self._timeout} s, got "
                "nothing; see what it does, or raise timeout"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(
                f"engine: expected a server at {self._address}, got {error}; start it first, with "
                "VLLM_SERVER_DEV_MODE=1"
            ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    """The reason that a server gives for a call that failed."""
    if error.code == 404:
        return "no such call; start the server with VLLM_SERVER_DEV_MODE=1"
    text = error.read().decode(errors="replace")
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:2000] or error.reason
