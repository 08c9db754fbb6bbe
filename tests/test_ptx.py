"""The CUDA kernels without a GPU: their PTX, as compiled, is interpreted against float64."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from ptx.launches import kernels_of
from test_cuda_binary import library, run  # noqa: F401  (a fixture)

ROOT = Path(__file__).parents[1]
CHECKS = ROOT / "tests/ptx"
OPS = sorted(path.parent.name for path in (ROOT / "csrc").glob("*/cuda.cu"))
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or COMPILER is None, reason="needs g++ on Linux"
)


class Built(NamedTuple):
    """What the interpreter loads: the ops' host code for CPU tensors, and the kernels."""

    host: Path
    ptx: Path

    def run(self) -> str:
        """What the checks of all ops say, in processes that load the host code."""
        command = [sys.executable, "-m", "ptx.run", self.host, self.ptx]
        done = subprocess.run(
            command,
            cwd=ROOT / "tests",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.stdout


@pytest.fixture(scope="module")
def built(library, tmp_path_factory) -> Built:  # noqa: F811
    folder = tmp_path_factory.mktemp("ptx")
    (folder / "kernels.ptx").write_text(run("cuobjdump", "--dump-ptx", library))
    torch_dir = Path(torch.__file__).parent
    options = [
        *(COMPILER, "-std=c++20", "-O0", "-fPIC", "-x", "c++"),
        *(f"-I{CHECKS}", f"-I{ROOT}/csrc", "-isystem", torch_dir / "include"),
    ]
    stable = ["-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    sources = [ROOT / "csrc/ops.cpp", *(ROOT / f"csrc/{op}/cuda.cu" for op in OPS)]

    def compile_(source: Path) -> Path:
        made = folder / f"{source.parent.name}-{source.stem}.o"
        of_ops = [] if source.name == "host.cpp" else stable
        subprocess.run([*options, *of_ops, "-c", source, "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_, [*sources, CHECKS / "host.cpp"]))
    libraries = [f"-L{torch_dir}/lib", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"]
    command = [COMPILER, "-shared", *objects, *libraries, "-o", folder / "host.so"]
    subprocess.run(command, check=True)
    return Built(folder / "host.so", folder / "kernels.ptx")


@pytest.fixture(scope="module")
def output(built) -> str:
    return built.run()


def passed(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("op", OPS)
def test_compiled_kernels_agree_with_float64(output, op):
    written = (CHECKS / f"check_{op}.py").read_text().count("\ndef check_")
    assert len([one for one in passed(output) if one["op"] == op]) == written > 0, output


def test_every_kernel_of_the_library_is_executed(built, output):
    kernels = kernels_of(built.ptx.read_text()).keys()
    assert kernels == {kernel for one in passed(output) for kernel in one["kernels"]}
    blocks = re.findall(r"executed (\d+) of (\d+) basic blocks", output)
    assert len(blocks) >= len(kernels)
