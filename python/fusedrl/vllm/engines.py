"""The calls by which a trainer updates an engine: in its process, its event loop, or over HTTP."""

# vLLM has an environment of its own, which the linters do not see.
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
_LOADING = 60.0  # seconds for a load, or for an error that says why there is none
_HEALTH = 5.0  # seconds in which a server says whether its engine runs
_ALIVE = 0.5  # seconds within which the end of an engine is noticed
# A server runs on this machine, and the calls have the channel's secret: no proxy is asked.
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_ENDED = (
    "engine: expected one that runs, got one that has ended during the call; start a new one: its "
    "log says why it ended"
)


class Engine:
    """An engine that a trainer updates: what it has to be asked for each step, and how."""

    timeout = 60.0  # seconds that its workers wait for a version
    has: tuple[str, int] | None = None  # the channel's session and the version that it was given
    stopped = False  # by an update that has not let it go on yet
    address: str | None = None  # of a server, which outlives its trainer
    in_loop = False  # whether it is called within an event loop
    requests_wait = True  # while it is paused, as LLM.generate() cannot
    has_ended: Callable[[], bool]  # where vLLM would wait for its answer

    # Each call is made by ask().
    label: Callable[[], Any]  # the name that it gives its weights
    name: Callable[[str], Any]  # gives them another one
    is_paused: Callable[[], Any]
    pause: Callable[[str], Any]  # "keep" pauses running requests, "wait" lets them end first
    resume: Callable[[], Any]
    tell: Callable[[dict[str, Any]], Any]  # passes a message to the workers
    drop_keys: Callable[[], Any]  # all keys and values, a connector's too; whether it could
    drop_encoded: Callable[[], Any]  # what the encoder has computed

    def __init__(self) -> None:
        self.lock = threading.Lock()  # held by the update that is running

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """The answer to a call, or an error once the engine has ended.

        The calls of an ``AsyncLLM`` are coroutines. Those of others block the calling thread.
        """
        answer: Future[Any] = Future()

        def wait() -> None:
            try:
                answer.set_result(call(*args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=wait, name="fusedrl-engine-call", daemon=True).start()
        while not wait_for([answer], timeout=_ALIVE).done:
            if self.has_ended() and not wait_for([answer], timeout=_ALIVE).done:
                raise RuntimeError(_ENDED)
        return answer.result()


_ENGINES: weakref.WeakValueDictionary[int | str, Engine] = weakref.WeakValueDictionary()


def engine_of(engine: Any) -> Engine:
    """The object that calls an engine, the same one for as long as anything uses it."""
    if isinstance(engine, str) and engine.startswith("http"):
        server = Server(engine)
        if not re.fullmatch(r"localhost|127(\.\d+){3}|::1", urlsplit(engine).hostname or ""):
            warn_once(
                f"engine: expected a loopback address, got {engine}; each call has the channel's "
                "secret, and who reaches that port controls the engine: serve it on 127.0.0.1"
            )
        return _ENGINES.setdefault(server.address, server)
    from vllm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM

    if not isinstance(engine, LLM | AsyncLLM):
        raise TypeError(
            "engine: expected a vllm.LLM, a vllm.v1.engine.async_llm.AsyncLLM or the address of a "
            f"server, such as 'http://localhost:8000', got {engine!r}; pass the engine "
            "itself, not what is around it"
        )
    is_offline = isinstance(engine, LLM)
    transfer = (engine.llm_engine if is_offline else engine).vllm_config.weight_transfer_config
    backend = None if transfer is None else transfer.backend
    if backend != BACKEND:
        raise ValueError(
            f"engine: expected one with backend={BACKEND!r}, got backend={backend!r}; start it "
            f"with weight_transfer_config=WeightTransferConfig(backend={BACKEND!r})"
        )
    # It keeps the engine, so that no other one gets its id.
    return _ENGINES.setdefault(id(engine), Offline(engine) if is_offline else InLoop(engine))


class Offline(Engine):
    """A ``vllm.LLM``, which may have requests that run by calls of ``llm_engine.step()``."""

    requests_wait = False

    def __init__(self, llm: Any) -> None:
        super().__init__()
        self._llm = llm
        self.label = llm.get_weight_version
        self.is_paused = lambda: False  # generate() would wait for ever
        self.pause = lambda mode: llm.sleep(level=0, mode=mode)
        self.resume = lambda: llm.wake_up(tags=["scheduling"])
        self.tell = lambda message: llm.init_weight_transfer_engine({"init_info": message})
        self.name = llm.update_weight_version
        self.drop_keys = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.drop_encoded = lambda: llm.llm_engine.reset_encoder_cache()
        self.has_ended = lambda: offline_engine_has_ended(llm)

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """As above; an engine in this process has to be called by this thread."""
        with interrupted_later():  # as it takes one call at a time, and an update makes another
            if runs_in_this_process(self._llm):
                return call(*args)
            return await super().ask(call, *args)


class InLoop(Engine):
    """An ``AsyncLLM``, called within the event loop that it runs in."""

    in_loop = True

    def __init__(self, llm: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest as Request

        super().__init__()
        self.label = llm.get_weight_version
        self.is_paused = llm.is_paused
        self.pause = lambda mode: llm.pause_generation(mode=mode, clear_cache=False)
        self.resume = llm.resume_generation
        self.tell = lambda message: llm.init_weight_transfer_engine(Request(init_info=message))
        self.name = llm.update_weight_version
        self.drop_keys = lambda: llm.reset_prefix_cache(True, reset_connector=True)
        self.drop_encoded = llm.reset_encoder_cache
        self.has_ended = lambda: llm.errored

    async def ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """As above, within the event loop."""
        task = asyncio.ensure_future(call(*args))
        try:
            while not (await asyncio.wait([task], timeout=_ALIVE))[0]:
                if self.has_ended():
                    raise RuntimeError(_ENDED)
        except BaseException:
            task.cancel()
            raise
        return task.result()


class Server(Engine):
    """A server that runs with ``VLLM_SERVER_DEV_MODE=1``, which these calls need."""

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
        self.tell = lambda it: call("POST init_weight_transfer_engine", {"init_info": it})
        self.name = lambda label: call("POST update_weight_version", {"new_version": label})
        self.drop_keys = lambda: call(f"POST {drop}")["success"]
        self.drop_encoded = lambda: call("POST reset_encoder_cache")
        self.check_health = lambda: call("GET health", timeout=_HEALTH)  # not asking the engine

    def has_ended(self) -> bool:
        """Whether its engine has ended; a server that does not answer in time is busy."""
        try:
            self.check_health()
        except (RuntimeError, TimeoutError) as error:
            return isinstance(error, RuntimeError)
        return False

    def _call(self, line: str, fields: Any = None, timeout: float | None = None) -> Any:
        method, path = line.split(" ")
        timeout = timeout or self.timeout + _LOADING
        request = urllib.request.Request(
            f"{self.address}/{path}",
            data=json.dumps(fields).encode() if fields else None,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with _DIRECTLY.open(request, timeout=timeout) as answer:
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
                    f"engine: expected {self.address} to answer within {timeout} s, got nothing; "
                    "see what it does, or raise timeout"
                ) from error
            raise RuntimeError(
                f"engine: expected a server at {self.address}, got {error}; start it first, with "
                "VLLM_SERVER_DEV_MODE=1, and give an address that its workers can call too"
            ) from error
