"""The CUDA kernels without a GPU: a host thread for each of its threads, under AddressSanitizer."""

from __future__ import annotations

import os
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
def library(tmp_path_factory) -> Path:
    torch_dir = Path(torch.__file__).parent
    library = tmp_path_factory.mktemp("emulation") / "emulated.so"
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-g1", "-fPIC", "-shared", "-fsanitize=address"),
            *("-fvisibility=hidden", "-DTORCH_TARGET_VERSION=0x020a000000000000"),
            *(f"-I{CHECKS}", f"-I{ROOT}/csrc", "-isystem", torch_dir / "include"),
            *(ROOT / "csrc/ops.cpp", "-x", "c++"),
            *(ROOT / f"csrc/{op}/cuda.cu" for op in OPS),
            *("-x", "none", f"-L{torch_dir}/lib", "-Wl,--no-as-needed", "-ltorch_cpu"),
            *("-o", library),
        ],
        check=True,
    )
    return library


@pytest.mark.parametrize("op", OPS)
def test_cuda_kernels_on_host_threads(library, op):
    # The sanitizer has to be the process's first library, with the C++ runtime whose exceptions it
    # watches; what Python itself leaks is not ours.
    preload = " ".join(_path_of(name) for name in ("libasan.so", "libstdc++.so.6"))
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, CHECKS / "run.py", library, op],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (CHECKS / f"check_{op}.py").read_text().count("\ndef check_")
    assert done.stdout.count("passed") == written > 0


def _path_of(library: str) -> str:
    command = [COMPILER, f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
