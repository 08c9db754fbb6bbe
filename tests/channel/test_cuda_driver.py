"""_host.CudaDriver: without a driver, and over a libcuda.so.1 of the host."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fusedrl import _host

pytestmark = pytest.mark.heavy

COMPILER = shutil.which("g++")
CALLS = """
from fusedrl import _host
driver = _host.CudaDriver()
print(driver.device_count(), driver.uuid(1))
address = driver.allocate(1, 1 << 21)
assert driver.open_memory(0, driver.export_memory(1, address)) == address
driver.close_memory(0, address)
event = driver.create_event(1, True)
assert (event, driver.create_event(1, False)) == (1006, 1002)  # the flags
assert driver.open_event(0, driver.export_event(1, event)) == event
driver.record_event(1, event, 5)
driver.stream_wait_event(1, 5, event)
print(driver.event_done(1, event), driver.capturing(1, 0), driver.capturing(1, 5))
driver.destroy_event(1, event)
driver.free(1, address)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A script over the library of the host, which fails where the keywords say."""
    if sys.platform != "linux" or COMPILER is None:
        pytest.skip("needs g++ on Linux")
    folder = tmp_path_factory.mktemp("fake")
    source = Path(__file__).parents[1] / "cuda_build" / "libcuda.cpp"
    flags = ["-std=c++20", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([COMPILER, *flags, source, "-o", folder / "libcuda.so.1"], check=True)
    played = {
        "LD_LIBRARY_PATH": str(folder),
        "FAKE_CUDA_NOTES": "1",
        "FAKE_CUDA_DEVICES": "2",
        "FAKE_CUDA_CAPTURED": "5",
    }

    def run(script, **environment):
        return subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | played | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_without_a_driver_nothing_is_loaded_before_the_first_call_and_the_error_names_the_way_out():
    script = """
from fusedrl import _host
driver = _host.CudaDriver()
assert "libcuda.so" not in open("/proc/self/maps").read()
for _ in range(2):
    try:
        driver.device_count()
    except RuntimeError as error:
        print(error)
assert driver.version() is None
"""
    try:
        _host.CudaDriver().device_count()
    except RuntimeError:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("expected libcuda.so.1, got") == 2
        assert done.stdout.count('device="cpu"') == 2
    else:
        pytest.skip("this machine has a driver")


def test_every_call_leaves_the_current_device_and_the_capture_mode_as_they_were(run):
    done = run(CALLS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "2 00112233-4455-6677-8899-aabbccddee0b",
        "True False True",
    ]
    notes = [line for line in done.stderr.splitlines() if "depth" in line]
    assert notes[0] == "cuInit depth=0 mode=0"
    assert sum(line.startswith("cuInit") for line in notes) == 1
    # Once a device, however often it is used.
    assert sum(line.startswith("cuDevicePrimaryCtxRetain") for line in notes) == 2
    on_a_device = [line for line in notes if not line.startswith(("cuInit", "cuDevice"))]
    assert len(on_a_device) == 15
    assert all(line.endswith("depth=1 mode=2") for line in on_a_device)  # relaxed
    assert {"push 10", "push 11"} == {
        line for line in done.stderr.splitlines() if line.startswith("push")
    }


@pytest.mark.parametrize(
    ("failing", "code", "remedy"),
    [
        ("cuMemAlloc", "2", "torch.cuda.empty_cache()"),
        ("cuIpcGetMemHandle", "801", "cannot share memory"),
        ("cuIpcOpenMemHandle", "1", "the process that exported it may have ended"),
        ("cuIpcOpenEventHandle", "1", "the process that exported it may have ended"),
        ("cuDevicePrimaryCtxRetain", "3", "spawn"),
        ("cuEventQuery", "700", "failed with CUDA_ERROR_FAKE (as asked)"),
    ],
)
def test_an_error_names_the_call_the_device_and_the_remedy(run, failing, code, remedy):
    done = run(CALLS, FAKE_CUDA_FAIL=failing, FAKE_CUDA_CODE=code)
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"RuntimeError: CUDA driver: {failing}")
    assert "failed with CUDA_ERROR_FAKE (as asked)" in message
    assert " on device " in message
    assert remedy in message


def test_an_event_that_is_not_done_is_no_error(run):
    script = "from fusedrl import _host; print(_host.CudaDriver().event_done(0, 1))"
    done = run(script, FAKE_CUDA_FAIL="cuEventQuery", FAKE_CUDA_CODE="600")
    assert done.stdout.strip() == "False"
