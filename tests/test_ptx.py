"""The CUDA kernels without a GPU: its threads by turns on the host, under AddressSanitizer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CHECKS = ROOT / "tests/cuda_emulation"
OPS = sorted(path.parent.name for path in (ROOT / "csrc").glob("*/cuda.cu"))
COMPILER = shutil.which("g++")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or COMPILER is None, reason="needs g++ on Linux"
)


@pytest.fixture(scope="module")
def output(tmp_path_factory) -> str:
    """What the checks of all ops say, in one process that loads the sanitizer and torch."""
    torch_dir = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("emulation") / "emulated.so"
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-Og", "-g1", "-fPIC", "-shared", "-fsanitize=address"),
            *("-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
            *(f"-I{CHECKS}", f"-I{ROOT}/csrc", "-isystem", torch_dir / "include"),
            *(ROOT / "csrc/ops.cpp", "-x", "c++"),
            *(ROOT / f"csrc/{op}/cuda.cu" for op in OPS),
            *("-x", "none", f"-L{torch_dir}/lib", "-Wl,--no-as-needed", "-ltorch_cpu"),
            *("-o", library),
        ],
        check=True,
    )
    # The sanitizer has to be the process's first library, with the C++ runtime whose exceptions it
    # watches; what Python itself leaks is not ours.
    preload = " ".join(_path_of(name) for name in ("libasan.so", "libstdc++.so.6"))
    done = subprocess.run(
        [sys.executable, CHECKS / "run.py", library],
        env={**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.stdout


@pytest.mark.parametrize("op", OPS)
def test_cuda_kernels_on_the_host(output, op):
    written = (CHECKS / f"check_{op}.py").read_text().count("\ndef check_")
    passed = re.findall(rf"^{op}: check_\w+ passed$", output, re.MULTILINE)
    assert len(passed) == written > 0, output


def _path_of(library: str) -> str:
    command = [COMPILER, f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
