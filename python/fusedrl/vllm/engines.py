"""The calls by which a trainer updates an engine: in-process, in its event loop, over HTTP."""

# vLLM is not installed where the linters run.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import threading
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any, Literal
from urllib.parse import urlsplit

from fusedrl.channel.ranks import interrupted_later
from fusedrl.compat.vllm import offline_engine_has_ended, runs_in_this_process
from fusedrl.logs import warn_once

BACKEND = "fusedrl"
InFlight = Literal["recompute", "wait"]
_LOAD_TIMEOUT = 60.0  # seconds, in addition to the workers' timeout
_HEALTH_TIMEOUT = 5.0  # seconds
_POLL_S = 0.5  # between two checks whether an engine has ended
# No proxy: a server runs on this machine, and the calls contain the channel's secret.
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ENDED = (
    "engine: expected a running engine, got one that ended during the call; see its log, and "
    "start a new one"
)


class Engine:
    """An engine that a trainer updates: its state, and the calls of an update."""

    timeout = 60.0  # seconds that its workers wait for a version
    loaded: tuple[str, int] | None = None  # the channel's session, and the version
    stopped = False  # whether an update has paused it and not resumed it yet
    address: str | None = None  # of a server, which outlives its trainer
    in_loop = False  # whether its calls are awaited in its event loop
    requests_wait = True  # whether requests wait while it is paused; LLM.generate() cannot
    has_ended: Callable[[], bool]  # vLLM would wait for the answer of an engine that has ended

    # ask() makes these calls.
    label: Callable[[], Any]  # returns the version label of its weights
    set_label: Callable[[str], Any]
    is_paused: Callable[[], Any]
    pause: Callable[[str], Any]  # "keep" pauses running requests, "wait" finishes them first
    resume: Callable[[], Any]
    send: Callable[[dict[str, Any]], Any]  # sends a message to the workers
    reset_kv_cache: Callable[[], Any]  # a connector's too; returns whether it succeeded
    reset_encoder_cache: Callable[[], Any]

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the update that is running

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call and return its answer; ``RuntimeError`` once the engine has ended.

        The calls of an ``AsyncLLM`` are coroutines. Other calls block the calling thread.
        """
        answer: Future[Any] = Future()

        def wait() -> None:
            try:
                answer.set_result(call(*args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=wait, name="fusedrl-engine-call", daemon=True).start()
        while not wait_for([answer], timeout=_POLL_S).done:
            if self.has_ended() and not wait_for([answer], timeout=_POLL_S).done:
                raise RuntimeError(_ENDED)
        return answer.result()


_ENGINES: weakref.WeakValueDictionary[int | str, Engine] = weakref.WeakValueDictionary()


def engine_of(engine: Any) -> Engine:
    """The :class:`Engine` of an engine or address; the same object while anything uses it."""
    if isinstance(engine, str) and engine.startswith("http"):
        server = Server(engine)
        if not re.fullmatch(r"localhost|127(\.\d+){3}|::1", urlsplit(engine).hostname or ""):
            warn_once(
                f"engine: expected a loopback address, got {engine}; calls contain the channel's "
                "secret, and who reaches that port controls the engine: serve it on 127.0.0.1"
            )
        return _ENGINES.setdefault(server.address, server)
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    if not isinstance(engine, LLM | AsyncLLM):
        raise TypeError(
            "engine: expected a vllm.LLM, a vllm.v1.engine.async_llm.AsyncLLM or the address of a "
            f"server, such as 'http://localhost:8000', got {engine!r}; pass the engine "
            "itself, not a wrapper"
        )
    is_offline = isinstance(engine, LLM)
    transfer = (engine.llm_engine if is_offline else engine).vllm_config.weight_transfer_config
    backend = None if transfer is None else transfer.backend
    if backend != BACKEND:
        raise ValueError(
            f"engine: expected one with backend={BACKEND!r}, got backend={backend!r}; start it "
            f"with weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
        )
    # The object keeps the engine, so that no other engine gets its id.
    return _ENGINES.setdefault(id(engine), Offline(engine) if is_offline else InLoop(engine))


class Offline(Engine):
    """A ``vllm.LLM``; calls of ``llm_engine.step()`` may have left it running requests."""

    requests_wait = False

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm
        self.label = llm.get_weight_version
        self.is_paused = lambda: False  # generate() would wait for ever
        self.pause = lambda mode: llm.sleep(level=0, mode=mode)
        self.resume = lambda: llm.wake_up(tags=["scheduling"])
        self.send = lambda message: llm.init_weight_transfer_engine({"init_info": message})
        self.set_label = llm.update_weight_version
        self.reset_kv_cache = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.reset_encoder_cache = lambda: llm.llm_engine.reset_encoder_cache()
        self.has_ended = lambda: offline_engine_has_ended(llm)

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call as above; in this thread if the engine runs in this process."""
        with interrupted_later():  # the engine handles one call at a time
            if runs_in_this_process(self._llm):
                return call(*args)
            return await super().ask(call, *args)


class InLoop(Engine):
    """An ``AsyncLLM``, called in the event loop that it runs in."""

    in_loop = True

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest as Request

        super().__init__()
        self.label = llm.get_weight_version
        self.is_paused = llm.is_paused
        self.pause = lambda mode: llm.pause_generation(mode=mode, clear_cache=False)
        self.resume = llm.resume_generation
        self.send = lambda message: llm.init_weight_transfer_engine(Request(init_info=message))
        self.set_label = llm.update_weight_version
        self.reset_kv_cache = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.reset_encoder_cache = llm.reset_encoder_cache
        self.has_ended = lambda: llm.errored

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Make a call as above, in the event loop."""
        task = asyncio.ensure_future(call(*args))
        try:
            while not (await asyncio.wait([task], timeout=_POLL_S))[0]:
                if self.has_ended():
                    raise RuntimeError(_ENDED)
        except BaseException:
            task.cancel()
            raise
        return task.result()


class Server(Engine):
    """A server that runs with ``VLLM_SERVER_DEV_MODE=1``, which enables these endpoints."""

    address: str

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address.rstrip("/")
        drop = "reset_prefix_cache?reset_running_requests=true&reset_external=true"
        call = self._call
        self.label = lambda: call("GET weight_info")["weight_version"]
        self.is_paused = lambda: call("GET is_paused")["is_paused"]
        self.pause = lambda mode: call(f"POST pause?mode={mode}&clear_cache=false")
        self.resume = lambda: call("POST resume")
        self.send = lambda message: call("POST init_weight_transfer_engine", {"init_info": message})
        self.set_label = lambda label: call("POST update_weight_version", {"new_version": label})
        self.reset_kv_cache = lambda: call(f"POST {drop}")["success"]
        self.reset_encoder_cache = lambda: call("POST reset_encoder_cache")
        self.check_health = lambda: call("GET health", timeout=_HEALTH_TIMEOUT)

    def has_ended(self) -> bool:
        """Whether its engine has ended; a server that does not answer in time counts as busy."""
        try:
            self.check_health()
        except (RuntimeError, TimeoutError) as error:
            return isinstance(error, RuntimeError)
        return False

    def _call(self, line: str, fields: Any = None, timeout: float | None = None) -> Any:
        method, path = line.split(" ")
        timeout = timeout or self.timeout + _LOAD_TIMEOUT
        request = urllib.request.Request(
            f"{self.address}/{path}",
            data=json.dumps(fields).encode() if fields else None,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with _WITHOUT_PROXY.open(request, timeout=timeout) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            reason = error.read().decode(errors="replace") or error.reason
            with contextlib.suppress(ValueError, KeyError, TypeError):
                reason = json.loads(reason)["error"]["message"]
            remedy = "see its log" if error.code != 404 else "start it with VLLM_SERVER_DEV_MODE=1"
            raise RuntimeError(
                f"engine: expected {self.address}/{path.partition('?')[0]} to succeed, got "
                f"{error.code}: {reason}; {remedy}"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(getattr(error, "reason", error), TimeoutError):
                raise TimeoutError(
                    f"engine: expected {self.address} to answer within {timeout} s, got no answer; "
                    "see the server's log, or raise timeout"
                ) from error
            raise RuntimeError(
                f"engine: expected a server at {self.address}, got {error}; start it first, with "
                "VLLM_SERVER_DEV_MODE=1, and pass an address that its workers can reach too"
            ) from error
