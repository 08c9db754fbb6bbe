"""vLLM's HTTP server, in processes of its own."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine_log_probs import Answer
from tiny_engines import OPTIONS, PROMPT

_OPTIONS = [
    *("--dtype", OPTIONS["dtype"], "--enforce-eager", "--enable-scale-out"),
    *("--kv-cache-memory-bytes", str(OPTIONS["kv_cache_memory_bytes"])),
    *("--max-model-len", str(OPTIONS["max_model_len"])),
    *("--weight-transfer-config", json.dumps({"backend": "fusedrl"})),
    *("--served-model-name", "tiny"),
]


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextmanager
def server(folder: Path, port: int, log: Path, seconds: float = 500) -> Iterator[str]:
    """The address of a server that answers, until the block ends."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--host", "127.0.0.1", "--port", str(port), *_OPTIONS]
    path = os.pathsep.join(filter(None, sys.path))  # where its workers find the faults of a test
    environ = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": path}
    address = f"http://127.0.0.1:{port}"
    with (
        log.open("a") as written,
        subprocess.Popen(
            command, env=environ, stdout=written, stderr=written, start_new_session=True
        ) as process,
    ):
        try:
            deadline = time.monotonic() + seconds
            while not _answers(address):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.2)
            yield address
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its workers too


class _NoRoutes(http.server.BaseHTTPRequestHandler):
    status, body = 404, b'{"detail":"Not Found"}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: Any) -> None:
        pass


@contextmanager
def without_routes() -> Iterator[str]:
    """The address of a server that has none of the routes that a trainer needs."""
    with _served(_NoRoutes) as address:
        yield address


@contextmanager
def _served(routes: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), routes) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{other.server_port}"
        other.shutdown()


@contextmanager
def paused_server() -> Iterator[tuple[str, list[str]]]:
    """The address of a server that is paused and does what it is told, and the calls it got."""
    calls: list[str] = []

    class Paused(_NoRoutes):
        status, body = 200, b'{"is_paused": true, "success": true}'

        def do_GET(self) -> None:
            calls.append(self.path[1:].partition("?")[0])
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            super().do_GET()

    with _served(Paused) as address:
        yield address, calls


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            return True
    except OSError:
        return False


def post(address: str, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What a server answers."""
    request = urllib.request.Request(
        f"{address}/{path}",
        data=json.dumps(fields).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def is_paused(address: str) -> bool:
    """Whether somebody has paused a server."""
    with urllib.request.urlopen(f"{address}/is_paused", timeout=60) as answer:
        return json.load(answer)["is_paused"]


def wait_until_running(address: str) -> None:
    """Wait until a server goes on; it is an error if somebody keeps it paused."""
    deadline = time.monotonic() + 60
    while is_paused(address):
        assert time.monotonic() < deadline, "the server stays paused"
        time.sleep(0.2)


def engine_processes() -> list[int]:
    """The pids of the engines of this process's servers."""
    found, parents = [], [os.getpid()]
    while parents:
        tasks = f"/proc/{parents.pop()}/task"
        for children in Path(tasks).glob("*/children"):
            for pid in map(int, children.read_text().split()):
                parents.append(pid)
                if "EngineCor" in Path(f"/proc/{pid}/comm").read_text():  # cut off
                    found.append(pid)
    return found


def generated(
    address: str, prompt: list[int] = PROMPT, tokens: int = 12, temperature: float = 0
) -> dict[str, Any]:
    """The tokens of a request, with their log-probs and the spans of their versions."""
    settings = {"max_tokens": tokens, "temperature": temperature, "ignore_eos": True, "logprobs": 0}
    fields = {"model": "tiny", "token_ids": prompt, "sampling_params": settings}
    [choice] = post(address, "inference/v1/generate", fields)["choices"]
    return choice


def answer_of(prompt: list[int], choice: dict[str, Any]) -> Answer:
    """What a request of :func:`generated` was answered with."""
    return Answer(
        prompt,
        choice["token_ids"],
        [entry["logprob"] for entry in choice["logprobs"]["content"]],
        [(int(s["version"]), s["start"], s["end"]) for s in choice["weight_versions"]],
    )


def completed(address: str) -> dict[str, Any]:
    """The greedy answer of the route that others know."""
    fields = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    fields = {"model": "tiny", "return_token_ids": True, **fields}
    [choice] = post(address, "v1/completions", fields)["choices"]
    return choice
