"""`make gpu` without a GPU: its parts on the CPU, beside tools that say what theirs would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import programs
import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks/gpu.py"

NVIDIA_SMI = "echo 'NVIDIA H200, 9.0, 580.1, 1980, 3201, 40, [N/A]'"
CLEAN = "echo '========= ERROR SUMMARY: 0 errors'"
RACE = """
echo '========= Error: Race reported between Write access at void fusedrl::policy_rows<false>'
echo '=========     Host Frame: fusedrl::add_tile in _C_cuda.abi3.so'
echo '========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)'
exit 9
"""
OF_OTHERS = """
echo '========= Uninitialized __global__ memory read of size 4 bytes at void gemm_kernel'
echo '========= ERROR SUMMARY: 2 errors'
exit 9
"""
COUNTED = """
echo '==PROF== Profiling "policy_rows": 0%....100%'
echo '"ID","Kernel Name","dram__bytes_read.sum","other"'
echo '"","","byte","%"'
echo '"0","policy_rows","1,024","5"'
"""
FORBIDDEN = "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1"


class Machine:
    """A PATH with tools of ours, and a pip that installs nothing."""

    def __init__(self, folder: Path):
        self.tools, self.out, self.site = (folder / name for name in ("bin", "out", "site"))
        self.tools.mkdir()
        (self.site / "pip").mkdir(parents=True)
        self.pip("")
        self.tool("nvidia-smi", NVIDIA_SMI)
        self.tool("cmake", "true")
        self.tool("nvcc", "true")

    def tool(self, name: str, script: str) -> None:
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def pip(self, program: str) -> None:
        (self.site / "pip/__main__.py").write_text(program)

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.tools), str(Path(sys.executable).parent), "/usr/bin:/bin"))
        return os.environ | {"PATH": path, "PYTHONPATH": str(self.site)}

    def arguments(self, part: str, *arguments: str) -> list[str | Path]:
        return [SCRIPT, "--rehearse", "--part", part, "--out", self.out, *arguments]

    def run(self, part: str, *arguments: str, status: int = 0) -> dict[tuple[str, str], dict]:
        """What the part records, by its name and that of the case."""
        done = programs.python(*self.arguments(part, *arguments), env=self.environment)
        assert done.returncode == status, done.stdout + done.stderr
        self.said = done.stdout
        return {(x["part"], x["case"]): x for x in self.records()}

    def records(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "gpu.jsonl").read_text().splitlines()]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def outcomes(records, part):
    return {case: (x["outcome"], x["why"]) for (p, case), x in records.items() if p == part}


def test_a_build_that_fails_stops_everything(machine):
    machine.pip("raise SystemExit('no compiler')")
    records = machine.run("build,check,bench,profile", status=1)
    assert outcomes(records, "build") == {"package": ("failed", "exit status 1: no compiler")}
    assert {part for part, _ in records} == {"machine", "build"}


def test_a_build_is_for_the_interpreter_and_made_once(machine):
    machine.pip("import sys; print(*sys.argv[1:])")
    machine.run("build")
