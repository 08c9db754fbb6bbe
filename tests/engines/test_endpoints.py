"""Who may call what controls a server's engine: vLLM's own app, over a worker without a model."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_servers import paused_server
from fastapi.testclient import TestClient
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from fusedrl import WeightChannel
from fusedrl.vllm import worker


class Engine:
    """Notes what it is told that is not for its worker."""

    errored = False
    vllm_config = SimpleNamespace(
        parallel_config=None, model_config=None, kv_transfer_config=None, compilation_config=None
    )

    def __init__(self) -> None:
        self.worker = worker.ChannelWeightTransferEngine(
            None, self.vllm_config, torch.device("cpu"), torch.nn.Module()
        )
        self.told: list[str] = []

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.worker.init_transfer_engine(self.worker.parse_init_info(request.init_info))

    def __getattr__(self, name: str) -> Any:
        async def call(*_: Any, **__: Any) -> bool:
            self.told.append(name)
            return True

        return call


@pytest.fixture
def channel():
    with WeightChannel.create({"a": torch.zeros(3)}) as channel:
        channel.publish()
        yield channel


@pytest.fixture
def engine(monkeypatch) -> Engine:
    monkeypatch.setattr(worker, "workers_of_this_engine", lambda: (1, 0, None))
    monkeypatch.setattr(worker, "ModelWeights", lambda *_: SimpleNamespace(unused=[]))
    return Engine()


@pytest.fixture
def server(engine, monkeypatch) -> TestClient:
    """It runs in development mode, and was started with an API key, which no call has."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    parser = make_arg_parser(FlexibleArgumentParser())
    app = build_app(parser.parse_args(["--api-key", "key"]), ("generate",))
    app.state.engine_client = engine
    return TestClient(app, raise_server_exceptions=False)


@pytest.mark.parametrize(
    ("call", "status", "told"),
    [
        ("POST /v1/completions", 401, []),
        ("POST /inference/v1/generate", 401, []),
        ("GET /weight_info", 200, ["get_weight_version"]),
        ("POST /pause?mode=keep", 200, ["pause_generation"]),
        ("POST /pause?mode=never", 400, []),
        ("POST /resume", 200, ["resume_generation"]),
        ("POST /reset_prefix_cache", 200, ["reset_prefix_cache"]),
        ("POST /update_weight_version", 400, []),
    ],
)
def test_the_api_key_does_not_guard_what_controls_the_engine(server, engine, call, status, told):
    answer = server.request(*call.split())
    assert (answer.status_code, engine.told) == (status, told), answer.text


LEASE = {"version": 1, "timeout": 0.1, "server": None, "stays": False}
OTHER = "0" * 32  # another session


@pytest.mark.parametrize(
    ("session", "asked", "said"),
    [
        (OTHER, {}, "handle: expected"),
        (OTHER, {"lease": LEASE}, "handle: expected"),
        (OTHER, {"load": 1}, "expected one that is leased"),
        (None, {"load": 1}, "expected one that is leased"),
        (None, {"lease": {**LEASE, "version": 7}}, "expected 7 or later"),
        (None, {"lease": {}}, "version"),
        (None, {"lease": "all"}, "string indices"),
        (None, {"address": {}}, "missing 3 required"),
        (None, {"address": "here"}, "must be a mapping"),
        (None, {"address": None}, "must be a mapping"),
    ],
    ids=str,
)
def test_a_message_that_is_not_a_trainers_leases_nothing(server, channel, session, asked, said):
    address = asdict(channel.handle)
    address["session"] = session or address["session"]
    with paused_server() as (elsewhere, calls):
        if session and "lease" in asked:
            asked = {"lease": {**LEASE, "server": elsewhere}}
        init_info = {"address": address, **asked}
        answer = server.post("/init_weight_transfer_engine", json={"init_info": init_info})
        assert calls == []  # who has not the secret cannot have a worker call others
    assert answer.status_code in (400, 500)
    assert said in answer.text
    assert address["session"] not in answer.text
    assert all(reader.leased == () for reader in channel.readers())
    assert not session or not channel.readers()


@pytest.mark.parametrize("body", [b"", b"{", b"{}", b'{"init_info": 3}'])
def test_what_is_no_message_is_refused_by_vllm(server, body):
    answer = server.post("/init_weight_transfer_engine", content=body)
    assert answer.status_code == 400


def test_weights_that_no_stage_of_a_pipeline_uses_are_refused(server, channel, monkeypatch):
    made = SimpleNamespace(unused=["b: expected no such entry"])
    monkeypatch.setattr(worker, "ModelWeights", lambda *_: made)
    init_info = {"address": asdict(channel.handle)}
    answer = server.post("/init_weight_transfer_engine", json={"init_info": init_info})
    assert "channel: 1 differences" in answer.text
    assert not channel.readers()


def test_a_trainer_that_has_the_secret_is_served(server, channel, engine):
    for asked in ({"lease": LEASE}, {"over": True}):
        init_info = {"address": asdict(channel.handle), **asked}
        answer = server.post("/init_weight_transfer_engine", json={"init_info": init_info})
        assert answer.status_code == 200, answer.text
        assert [reader.leased for reader in channel.readers()] == [(1,) * ("lease" in asked)]
