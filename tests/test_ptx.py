"""The CUDA kernels without a GPU: their PTX, as compiled, is interpreted against float64."""

from __future__ import annotations

import json
import os
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

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs g++ on Linux"),
]


class Built(NamedTuple):
    """What the interpreter loads: the ops' host code for CPU tensors, and the kernels."""

    host: Path
    ptx: Path


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
    done = subprocess.run(
        [sys.executable, "-m", "ptx.run", *built],
        cwd=ROOT / "tests",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


def listed(output: str) -> list[dict]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def rest_of(output: str) -> str:
    return "\n".join(line for line in output.splitlines() if not line.startswith("{"))


@pytest.mark.parametrize("op", OPS)
def test_compiled_kernels_agree_with_float64(output, op):
    written = (CHECKS / f"check_{op}.py").read_text().count("\ndef check_")
    passed = [one for one in listed(output) if one["op"] == op]
    assert len(passed) == written > 0, rest_of(output)


def test_every_kernel_of_the_library_is_executed(built, output):
    kernels = kernels_of(built.ptx.read_text())
    executed = dict[str, set[int]]()
    for one in listed(output):
        for name, places in one["kernels"].items():
            executed.setdefault(name, set()).update(places)
    assert kernels.keys() == executed.keys()
    reached = sum(len(kernels[name].blocks[at]) for name in executed for at in executed[name])
    assert reached > 0.8 * sum(len(kernel.code) for kernel in kernels.values())
