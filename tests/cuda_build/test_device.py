"""What the package finds: an H100, which it serves, or a driver that is too old for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from fusedrl import _host, native

COMPILER = _host.build_info()["cuda_compiler"].partition(".")[0]
TOO_OLD = f"expected a driver for CUDA {COMPILER}.0 or newer, got one for CUDA 11.8"
ON_AN_OLD_DRIVER = """
import os
import torch

log_probs = torch.zeros(5).cuda()
os.environ["FAKE_CUDA_DRIVER"] = "11080"  # of which torch does not know
from fusedrl import native, token_kl

print(native.device_error(0))
print(token_kl(log_probs, log_probs).kl.device)
"""


def info(**environment):
    command = [sys.executable, "-m", "fusedrl", "info", "--json"]
    environment = os.environ | environment
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def test_the_gpu_is_served():
    assert torch.cuda.get_device_name(0) == "NVIDIA H100 (played)"
    assert native.device_error(0) is None


def test_info_lists_the_gpu():
    facts = info()
    assert facts["machine"]["cuda:0"] == "NVIDIA H100 (played), sm_90, 80.0 GiB, 132 SMs"
    assert facts["libraries"]["_C"] == facts["libraries"]["_C_cuda"] == "loaded"


def test_info_says_that_the_driver_is_too_old():
    facts = info(FAKE_CUDA_DRIVER="11080")
    assert facts["libraries"]["_C"] == "loaded"
    assert TOO_OLD in facts["libraries"]["_C_cuda"]


def test_the_reference_runs_where_the_driver_is_too_old(tmp_path):
    launches = tmp_path / "launches"
    done = subprocess.run(
        [sys.executable, "-c", ON_AN_OLD_DRIVER],
        env=os.environ | {"FAKE_CUDA_LAUNCHES": str(launches)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    why, device = done.stdout.splitlines()
    assert TOO_OLD in why and device == "cuda:0"
    assert "using the reference implementation" in done.stderr
    assert "fusedrl::" not in launches.read_text()
