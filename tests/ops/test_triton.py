"""Triton kernels without a GPU: values in the interpreter, machine code for every architecture."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[1]
TRITON = importlib.util.find_spec("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") != "0"
needs_triton = pytest.mark.skipif(TRITON is None, reason="triton is not installed")
needs_compiler = pytest.mark.skipif(
    TRITON is None or INTERPRETED, reason="triton is not installed, or interprets"
)


def python(*args: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.heavy
def test_importing_the_op_does_not_import_triton():
    python(
        "-c", "import sys, fusedrl.ops.linear_token_log_probs; assert 'triton' not in sys.modules"
    )


@needs_triton
@pytest.mark.parametrize(
    ("checks", "passed"),
    [
        pytest.param(["public_function"], 1, marks=pytest.mark.heavy, id="forward_and_gradients"),
        pytest.param([], 12, marks=pytest.mark.slow, id="all"),
    ],
)
def test_values_in_the_interpreter(checks, passed):
    out = python(ROOT / "triton_interpreter/run.py", *checks, TRITON_INTERPRET="1")
    assert out.count("passed") == passed


class Compiler(NamedTuple):
    """The launch code as it is, but for a GPU that is not there: kernels are compiled, not run."""

    kernels: SimpleNamespace  # the module under test
    capability: int

    def compile(self, rows, classes, depth, dtype, *, bias=False, softcap=0.0, entropy=False):
        hidden, weight = (torch.empty(n, depth, dtype=dtype) for n in (rows, classes))
        self.kernels.partials(
            *(hidden, weight, hidden.new_empty(classes) if bias else None),
            *(torch.empty(rows, dtype=torch.int64), torch.empty(1), 1.0, softcap, entropy),
        )

    def compiled(self, kernel: str) -> list:
        """Every variant that the JIT has compiled of a kernel."""
        return list(getattr(self.kernels, kernel).device_caches[self.capability][0].values())


@pytest.fixture
def compiler_for(monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from fusedrl.ops.linear_token_log_probs import triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run = triton.JITFunction.run

    def compile_only(self, *args, warmup, **kwargs):
        return run(self, *args, warmup=True, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)

    def make(capability: int) -> Compiler:
        fake = SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(driver, "_active", fake)
        monkeypatch.setattr(kernels, "_compute_capability", lambda tensor: capability)
        for kernel in (kernels._split_kernel, kernels._merge_kernel):
            kernel.device_caches.pop(capability, None)
        return Compiler(kernels, capability)

    return make


@pytest.mark.slow
@needs_compiler
def test_one_compilation_for_all_lengths(compiler_for):
    compiler = compiler_for(90)
    rows = [1, 2, 3, 8, 15, 16, 17, 31, 32, 64, 127, 128, 129, 1000, 1024, 4095, 4096, 9999]
    classes = [1, 2, 5, 16, 17, 32, 127, 128, 129, 256, 257, 1000, 1024, 32000, 32768]
    classes += [50257, 129920, 151936]
    for m, v in [*((m, 129) for m in rows), *((129, v) for v in classes)]:
        compiler.compile(m, v, 64, torch.bfloat16)
    for depth in (128, 192, 2048):
        compiler.compile(129, 129, depth, torch.bfloat16)
    assert len(compiler.compiled("_split_kernel")) == 1
    assert len(compiler.compiled("_merge_kernel")) == 1
    compiler.compile(129, 129, 80, torch.bfloat16)  # no whole number of steps
    assert len(compiler.compiled("_split_kernel")) == 2


ALL = {"bias": True, "softcap": 30.0, "entropy": True}
# The last three are less of the same code.
CASES = [
    *((torch.bfloat16, 1024, ALL), (torch.float16, 1008, ALL), (torch.float32, 1000, ALL)),
    *((torch.bfloat16, 1024, {}), (torch.bfloat16, 1024, {"entropy": True})),
    (torch.bfloat16, 1000, ALL),
]
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 90: "wgmma", 100: "tcgen05.mma", 120: "mma.sync"}


def on_every_architecture():
    """Those of less shared memory with the first case alone; one of them if not slow."""
    for (i, case), capability in itertools.product(enumerate(CASES), SHARED_KIB):
        if i == 0 or capability in (80, 90, 100):
            quick = (i, capability) == (0, 90)
            yield pytest.param(
                *case, capability, marks=pytest.mark.heavy if quick else pytest.mark.slow
            )


@needs_compiler
@pytest.mark.parametrize(("dtype", "depth", "options", "capability"), list(on_every_architecture()))
def test_compiles_without_spills(compiler_for, tmp_path, dtype, depth, options, capability):
    compiler = compiler_for(capability)
    compiler.compile(4, 300, depth, dtype, **options)
    (split,), (merge,) = (compiler.compiled(f"_{name}_kernel") for name in ("split", "merge"))
    for kernel in (split, merge):
        assert kernel.metadata.target.arch == capability
        assert kernel.metadata.shared <= SHARED_KIB[capability] * 1024
        assert stack_bytes(kernel.asm["cubin"], tmp_path) == 0
    instruction = TENSOR_CORES[capability]
    assert (instruction in split.asm["ptx"]) == (dtype != torch.float32)
    assert "tf32" not in split.asm["ptx"]
    if depth % 16 == 0:
        assert "cp.async" in split.asm["ptx"]


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """What a kernel spills; it has no other use of a stack."""
    bundled = Path(TRITON.origin).parent / "backends/nvidia/bin"
    tool = shutil.which("cuobjdump", path=str(bundled)) or shutil.which("cuobjdump")
    if tool is None:
        pytest.skip("there is no cuobjdump")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run(
        [tool, "--dump-resource-usage", path], check=True, capture_output=True, text=True
    )
    (stack,) = re.findall(r"STACK:(\d+)", done.stdout)
    return int(stack)
