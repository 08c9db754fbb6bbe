"""What is inside the CUDA library: its architectures, and no torch symbol but the C ABI's."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_gpu_model import model

from fusedrl import _host, native

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def library() -> Path:
    path = native.find("_C_cuda")
    if path is None:
        pytest.skip("built without _C_cuda (no nvcc)")
    return path


def run(tool: str, *args: str | Path) -> str:
    """NVIDIA's program of that name; Triton brings some where there is no CUDA toolkit."""
    spec = importlib.util.find_spec("triton")
    bundled = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else ""
    found = shutil.which(tool) or shutil.which(tool, path=str(bundled))
    if not found:
        pytest.skip(f"there is no {tool}")
    return subprocess.run([found, *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def architectures() -> set[int]:
    """What the library was built for; a quick build may name fewer than CMakeLists.txt."""
    named = _host.build_info()["cuda_architectures"]
    return {int(arch) for arch in re.findall(r"\d+", named)}


def test_a_release_is_for_every_generation():
    (default,) = re.findall(r'FUSEDRL_CUDA_ARCHS "([^"]+)"', (ROOT / "CMakeLists.txt").read_text())
    assert default.split(";") == ["80-real", "90-real", "100"]  # the last with PTX


def test_has_machine_code_and_ptx(library, architectures):
    built = {int(arch) for arch in re.findall(r"sm_(\d+)", run("cuobjdump", "--list-elf", library))}
    assert built == architectures
    ptx = {int(arch) for arch in re.findall(r"sm_(\d+)", run("cuobjdump", "--list-ptx", library))}
    assert max(ptx) == max(built)


@pytest.mark.heavy
def test_kernels_keep_everything_in_registers(library):
    """In 64 of a thread at most: two blocks of 512 threads share the registers of a processor."""
    usage = run("cuobjdump", "--dump-resource-usage", library)
    used = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    compiled = "".join(name for name, _, _ in used)
    assert not [name for name in model.written_kernels() if name not in compiled]
    too_large = [one for one in used if int(one[1]) > 64 or int(one[2]) > 0]
    assert not too_large


def test_needs_only_the_c_symbols_of_torch(library):
    needed = run("nm", "--dynamic", "--undefined-only", library).split("\n")
    names = {line.split()[-1].split("@")[0] for line in needed if line.strip()}
    of_torch = {name for name in names if re.search("torch|c10|aten", name)}
    assert "aoti_torch_get_current_cuda_stream" in of_torch
    assert all(re.fullmatch(r"(aoti_)?torch_\w+", name) for name in of_torch), sorted(of_torch)


def test_brings_its_own_cuda_runtime(library):
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "--dynamic", library))
    assert {"libtorch_cpu.so", "libtorch_cuda.so"} <= set(needed)
    assert not [name for name in needed if "cudart" in name]
