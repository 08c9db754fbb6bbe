"""What lets the requests of a vLLM server name adapters that are in its workers' memory alone."""

# vLLM has an environment of its own, which the linters do not see.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from typing import Any

from fusedrl.compat.vllm import served_adapters
from fusedrl.vllm.engines import ADAPTERS_ROUTE
from fusedrl.vllm.lora_adapters import lora_request


class ServedAdapters:
    """ASGI middleware of a server: its requests' ``model`` may be the name of a channel's adapters.

    vLLM's own names stand for files. Start the server with ``--middleware
    fusedrl.vllm.ServedAdapters``; an update of :class:`EngineWeights` then gives it the name, once
    its workers have the adapters. Everything else is passed on.

    Args:
        app: what handles the other requests.
    """

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http" or scope["path"] != f"/{ADAPTERS_ROUTE}":
            return await self._app(scope, receive, send)
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        try:
            await _name(
                scope["app"].state.openai_serving_models, **await Request(scope, receive).json()
            )
        except Exception as error:
            answer = JSONResponse({"error": {"message": str(error)}}, 400)
        else:
            answer = JSONResponse({})
        await answer(scope, receive, send)


async def _name(models: Any, name: str, number: int, are_loaded: bool) -> None:
    """Let requests name adapters if they are loaded, else only check that they could."""
    requests, processes = served_adapters(models)
    other = requests.get(name)
    if models.is_base_model(name) or (other is not None and other.lora_int_id != number):
        raise ValueError(
            f"lora_name: expected one that the server gives to nothing else, got {name!r}; choose "
            "another one"
        )
    if processes > 1:
        raise ValueError(
            f"engine: expected a server of one process, got {processes}, of which one alone would "
            "know the adapters; start it with --api-server-count 1"
        )
    if are_loaded:
        if number not in await models.engine_client.list_loras():
            raise ValueError(
                "engine: expected adapters in its memory, got none, because something else has "
                "removed them since the update; update again"
            )
        requests[name] = lora_request(name, number)
