"""What is asked of CUDA's driver: without one, and over a libcuda.so.1 of the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedrl import native

pytestmark = pytest.mark.heavy

COMPILER = shutil.which("g++")
CALLS = """
import ctypes
from contextlib import nullcontext
import torch
from fusedrl import _host, native
from fusedrl.channel import cuda
from fusedrl.channel.cuda import CudaMemory

print(native._driver_version())
torch.cuda.device = lambda device: nullcontext()  # as this build of torch may be for the CPU
torch.cuda.synchronize = lambda device: None
driver = cuda._DRIVER
driver.uuids, driver.capturing = lambda: ["a", "b"], lambda device: False
driver.current_stream = lambda device: (1 << 40) + device
driver.tensor = lambda device, address, nbytes, owner: torch.frombuffer(
    (ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8
)
memory = CudaMemory.create(torch.device("cuda:1"), 2, 3 << 20)
memory.slot(1).fill_(7)
there = CudaMemory.open(memory.manifest | {"pid": 0})
print(there.slot(1).unique().tolist())
called = []
_host.give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called.append)
_host.give_back = ctypes.cast(_host.give_back, ctypes.c_void_p).value
there.give_back((1 << 40) + 5)
print(called == [(1 << 40) + 5])
there.close()
memory.close()
native._driver_version()
"""


def test_without_a_driver_nothing_is_loaded_before_the_first_call_and_the_error_says_so():
    script = """
import torch
from fusedrl import WeightChannel, native
assert "libcuda.so" not in open("/proc/self/maps").read()
assert native._driver_version() is None
for _ in range(2):
    try:
        WeightChannel.create({"a": torch.zeros(1)}, device="cuda")
    except (AssertionError, RuntimeError) as error:  # torch's
        print(error)
"""
    if native._driver_version() is not None:
        pytest.skip("this machine has a driver")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wanted = "NVIDIA" if torch.version.cuda else "Torch not compiled with CUDA enabled"
    assert done.stdout.count(wanted) == 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The calls over the library of the host, which fails where the keywords say."""
    if sys.platform != "linux" or COMPILER is None:
        pytest.skip("needs g++ on Linux")
    folder = tmp_path_factory.mktemp("fake")
    source = Path(__file__).parents[1] / "cuda_build" / "libcuda.cpp"
    flags = ["-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, source, "-o", folder / "libcuda.so.1"], check=True)
    played = {"LD_LIBRARY_PATH": str(folder), "FAKE_CUDA_NOTES": "1", "FAKE_CUDA_DEVICES": "2"}

    def run(**environment):
        return subprocess.run(
            [sys.executable, "-c", CALLS],
            env=os.environ | played | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_every_call_is_made_on_its_device_and_leaves_captures_alone(run):
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["13000", "[7]", "True"]
    notes = [line.split() for line in done.stderr.splitlines() if "context" in line]
    assert [name for name, *_ in notes] == [
        "cuDriverGetVersion",
        "cuDevicePrimaryCtxRetain",  # once, however often it is used
        *(2 * ["cuMemAlloc", "cuIpcGetMemHandle"]),
        *(2 * ["cuIpcOpenMemHandle"]),
        "cuLaunchHostFunc",
        *(2 * ["cuIpcCloseMemHandle"]),
        *(2 * ["cuMemFree"]),
        "cuDriverGetVersion",
    ]
    assert all(where == ["context=11", "mode=2"] for _, *where in notes[2:-1])  # relaxed
    assert notes[-1][1:] == ["context=11", "mode=0"]


@pytest.mark.parametrize(
    ("failing", "remedy"),
    [
        ("cuMemAlloc", "use host memory, device='cpu'"),
        ("cuIpcGetMemHandle", "use host memory, device='cpu'"),
        ("cuIpcOpenMemHandle", "open the handle while its publisher runs"),
        ("cuDevicePrimaryCtxRetain", "use host memory, device='cpu'"),
        ("cuLaunchHostFunc", "use host memory, device='cpu'"),
    ],
)
def test_an_error_names_the_call_and_the_remedy(run, failing, remedy):
    done = run(FAKE_CUDA_FAIL=failing, FAKE_CUDA_CODE="801")
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"RuntimeError: CUDA driver: {failing}")
    assert "failed with error 801 (as asked)" in message
    assert remedy in message
