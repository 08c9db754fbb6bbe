"""A server is not left paused by a trainer that goes in the middle of an update."""

import subprocess
import sys
import time

import pytest
from engine_servers import paused_server

from fusedrl.vllm import pause_guard
from fusedrl.vllm.pause_guard import PauseGuard

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
    monkeypatch.setattr(pause_guard, "_LOOK", 0.01)
    monkeypatch.setattr(pause_guard, "_SETTLED", 0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("goes", ["ends", "leaves", "is over"])
def test_the_guard_brings_the_update_to_its_end(trainer, goes):
    with paused_server() as (address, calls):
        channel = {"pid": trainer.pid, "fd": 3, "session": "secret"}
        guard = PauseGuard(address, channel, 7)
        guard.stays = False
        time.sleep(0.1)
        assert guard.is_watching
        assert calls == []
        if goes == "ends":  # whatever its channel says, which it may have closed before
            trainer.kill()
        elif goes == "leaves":
            guard.left = True
        else:
            guard.end()
        while guard.is_watching:
            time.sleep(0.01)
        assert calls == ([] if goes == "is over" else BRINGS)
