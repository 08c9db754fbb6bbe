"""What is inside the CUDA library: its architectures, and no torch symbol but the C ABI's."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from fusedrl import _host, native

ROOT = Path(__file__).parents[1]

spec = importlib.util.spec_from_file_location("sass_facts", ROOT / "tests/sass/facts.py")
assert spec is not None and spec.loader is not None
sass = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sass)


@pytest.fixture(scope="module")
def library() -> Path:
    path = native.find("_C_cuda")
    if path is None:
        pytest.skip("built without _C_cuda (no nvcc)")
    return path


def run(tool: str, *args: str | Path) -> str:
    found = sass.tool(tool)
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


@pytest.fixture(scope="module")
def facts(library) -> dict:
    if (why := sass.missing()) is not None:
        pytest.skip(why)
    return sass.facts(library)


def test_kernels_keep_everything_in_registers(facts):
    for architecture, kernels in facts.items():
        # At least this many kernels: of token_log_probs, token_kl, exact_kl, importance_weights,
        # and around the matrix products of a linear head.
        assert len(kernels) >= 9 + 8 + 12 + 3 + 22
        assert not [name for name, kernel in kernels.items() if kernel["stack"]], architecture


def test_machine_code_is_what_was_recorded(facts):
    """Which is what benchmarks/gpu_model.py makes its predictions of."""
    recorded = json.loads(sass.RECORDED.read_text())
    compiler = sass.compiler()
    if compiler not in recorded:
        pytest.skip(f"{sass.RECORDED.name} has facts of {', '.join(recorded)}, not of {compiler}")
    changed = [
        f"sm_{architecture} {name}: {kernels.get(name)}, recorded {kernel}"
        for architecture, kernels in facts.items()
        for name, kernel in recorded[compiler].get(architecture, {}).items()
        if kernels.get(name) != kernel
    ]
    assert not changed, "\n".join([*changed, f"if that is meant, run {sass.__file__}"])


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
