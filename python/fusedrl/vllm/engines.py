"""The calls by which a trainer updates an engine: in its process, its event loop, or over HTTP."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Literal

from fusedrl.compat.vllm import offline_engine_has_ended, runs_in_this_process

BACKEND = "fusedrl"
InFlight = Literal["recompute", "wait"]
# Seconds that workers have for loading a version, or for finding out that it does not exist.
_LOADING = 60.0
# Seconds in which a server says whether its engine runs.
_HEALTH = 5.0
# Seconds within which the end of an engine is noticed.
_ALIVE = 0.5
# A server runs on this machine, and the calls have the channel's secret: no proxy is asked.
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ENDED = (
    "engine: expected one that runs, got one that has ended during the call; start a new one: its "
    "log says why it ended"
)


class Engine:
    """An engine that a trainer updates: what it has to be asked for each step, and how.

    The calls are made by :meth:`ask`. It is a coroutine because the calls of ``AsyncLLM`` are. That
    of other engines blocks the calling thread until the engine has answered, and never waits for an
    event loop.

    Attributes:
        key: identifies the engine for as long as this object exists.
        address: that of a server, which outlives its trainer; ``None`` for an engine that ends with
            this process.
        in_loop: whether the engine is called within an event loop.
        requests_wait: whether requests wait while it is paused, as ``LLM.generate()`` cannot.
        label: returns the name that the engine gives its weights.
        is_paused: returns whether somebody has paused the engine.
        pause: pauses running requests with ``"keep"``, or lets them end first with ``"wait"``.
        resume: lets requests go on.
        tell: passes a message to the workers' ``ChannelWeightTransferEngine``.
        name: gives the weights another name.
        drop_keys: drops keys and values, those of running requests and of a connector included;
            returns whether all of them could be dropped.
        drop_encoded: drops what the encoder has computed.
    """

    key: int | str
    address: str | None = None
    in_loop = False
    requests_wait = True
    label: Callable[[], Any]
    is_paused: Callable[[], Any]
    pause: Callable[[str], Any]
    resume: Callable[[], Any]
    tell: Callable[[dict[str, Any]], Any]
    name: Callable[[str], Any]
    drop_keys: Callable[[], Any]
    drop_encoded: Callable[[], Any]

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer to a call, or an error once the engine has ended, where vLLM would wait."""
        raise NotImplementedError

    async def forget(self) -> None:
        """Drop everything computed with the former weights, that of running requests included."""
        if not await self.ask(self.drop_keys):
            raise RuntimeError(
                "engine: expected its KV cache and that of its connector to be dropped, got a "
                "refusal; its log says why, and the next update tries again"
            )
        await self.ask(self.drop_encoded)


def engine_of(engine: Any, timeout: float) -> Engine:
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


def _answer_in_thread(call: Callable[[], Any], has_ended: Callable[[], bool]) -> Any:
    """Make a call that never returns if the engine ends meanwhile, and raise an error then."""
    answer: Future[Any] = Future()

    def wait() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=wait, name="fusedrl-engine-call", daemon=True).start()
    while not wait_for([answer], timeout=_ALIVE).done:
        if has_ended() and not wait_for([answer], timeout=_ALIVE).done:
            raise RuntimeError(_ENDED)
    return answer.result()


class Offline(Engine):
    """A ``vllm.LLM``, which may have requests that run by calls of ``llm_engine.step()``."""

    requests_wait = False

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.key = id(llm)
        self.label = llm.get_weight_version
        self.is_paused = lambda: False  # generate() would wait for ever
        self.pause = lambda mode: llm.sleep(level=0, mode=mode)
        self.resume = lambda: llm.wake_up(tags=["scheduling"])
        self.tell = lambda message: llm.init_weight_transfer_engine({"init_info": message})
        self.name = llm.update_weight_version
        self.drop_keys = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.drop_encoded = lambda: llm.llm_engine.reset_encoder_cache()

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer to a call; an engine in this process has to be called by this thread."""
        if runs_in_this_process(self._llm):
            return call(*args)
        return _answer_in_thread(lambda: call(*args), lambda: offline_engine_has_ended(self._llm))


class InLoop(Engine):
    """An ``AsyncLLM``, called within the event loop that it runs in."""

    in_loop = True

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest as Request

        self._llm = llm
        self.key = id(llm)
        self.label = llm.get_weight_version
        self.is_paused = llm.is_paused
        self.pause = lambda mode: llm.pause_generation(mode=mode, clear_cache=False)
        self.resume = llm.resume_generation
        self.tell = lambda message: llm.init_weight_transfer_engine(Request(init_info=message))
        self.name = llm.update_weight_version
        self.drop_keys = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.drop_encoded = lambda: llm.reset_encoder_cache()

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer to a call, or an error once the engine has ended, where vLLM would wait."""
        task = asyncio.ensure_future(call(*args))
        try:
            while not (await asyncio.wait([task], timeout=_ALIVE))[0]:
                if self._llm.errored:
                    raise RuntimeError(_ENDED)
        except BaseException:
            task.cancel()
            raise
        return task.result()


class Server(Engine):
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
        self.key = self.address = self._server = address.rstrip("/")
        self._timeout = timeout
        self.label = lambda: self._get("weight_info")["weight_version"]
        self.is_paused = lambda: self._get("is_paused")["is_paused"]
        self.pause = lambda mode: self._post(f"pause?mode={mode}&clear_cache=false")
        self.resume = lambda: self._post("resume")
        self.tell = lambda message: self._post(
            "init_weight_transfer_engine", {"init_info": message}
        )
        self.name = lambda label: self._post("update_weight_version", {"new_version": label})
        drop = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
        self.drop_keys = lambda: json.loads(self._post(drop))["success"]
        self.drop_encoded = lambda: self._post("reset_encoder_cache")

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer to a call, or an error once the engine has ended, where vLLM would wait."""
        return _answer_in_thread(lambda: call(*args), self._has_ended)

    def _has_ended(self) -> bool:
        try:
            self._request("GET", "health", None, _HEALTH)
        except TimeoutError:
            pass  # busy
        except RuntimeError as error:
            return not isinstance(getattr(error.__cause__, "reason", None), TimeoutError)
        return False

    def _get(self, path: str) -> Any:
        return json.loads(self._request("GET", path, None, self._timeout))

    def _post(self, path: str, fields: dict[str, Any] | None = None) -> bytes:
        data = b"" if fields is None else json.dumps(fields).encode()
        return self._request("POST", path, data, self._timeout)

    def _request(self, method: str, path: str, data: bytes | None, timeout: float) -> bytes:
        request = urllib.request.Request(
            f"{self._server}/{path}",
            data=data,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with DIRECTLY.open(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"engine: expected {self._server}/{path.partition('?')[0]} to succeed, got "
                f"{error.code}: {_reason(error)}; the server's log says more"
            ) from error
        except TimeoutError as error:
            raise TimeoutError(
                f"engine: expected {self._server} to answer within {timeout} s, got "
                "nothing; see what it does, or raise timeout"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RuntimeError(
                f"engine: expected a server at {self._server}, got {error}; start it first, with "
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
