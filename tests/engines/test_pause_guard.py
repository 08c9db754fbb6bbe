"""A server is not left paused by a trainer that ends in the middle of an update."""

import subprocess
import sys
import time

import pytest
from engine_servers import paused_server

from fusedrl.vllm import guard as module

pytestmark = pytest.mark.heavy

BRINGS = [
    "is_paused",
    "pause",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "update_weight_version",
    "init_weight_transfer_engine",
    "update_weight_version",
    "resume",
]


@pytest.fixture
def trainer(monkeypatch):
    """Its process, beside a guard that does not wait for what it has sent."""
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(module, "_GRACE_S", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("goes", ["ends", "is over"])
def test_the_guard_brings_the_update_to_its_end(trainer, goes, stays):
    with paused_server() as (address, calls):
        channel = {"pid": trainer.pid, "fd": 3, "session": "secret"}
        over = module.guard(address, channel, 7, stays=stays)
        time.sleep(0.1)
        assert not over.is_set()
        assert calls == []
        if goes == "ends":  # whatever its channel says, which it may have closed before
            trainer.kill()
        else:
            over.set()
        assert over.wait(60)
        assert calls == ([] if goes == "is over" else BRINGS[: len(BRINGS) - stays])
