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
COMPILER = shutil.which("g++")


@pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="needs g++ on Linux")
def test_cuda_kernels_on_host_threads(tmp_path):
    torch_dir = Path(torch.__file__).parent
    library = tmp_path / "emulated.so"
    subprocess.run(
        [
            *(COMPILER, "-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fsanitize=address"),
            *("-DTORCH_TARGET_VERSION=0x020a000000000000", f"-I{ROOT}/tests/cuda_emulation"),
            *(f"-I{ROOT}/csrc", "-isystem", torch_dir / "include", ROOT / "csrc/ops.cpp"),
            *("-x", "c++", *sorted((ROOT / "csrc").glob("*/cuda.cu")), "-x", "none"),
            *(f"-L{torch_dir}/lib", "-Wl,--no-as-needed", "-ltorch_cpu", "-o", library),
        ],
        check=True,
    )
    # The sanitizer has to be the process's first library, with the C++ runtime whose exceptions it
    # watches; what Python itself leaks is not ours.
    preload = " ".join(_path_of(name) for name in ("libasan.so", "libstdc++.so.6"))
    environment = {"LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/cuda_emulation/run.py", library],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == 18


def _path_of(library: str) -> str:
    command = [COMPILER, f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
