"""`make gpu` without a GPU: its parts on the CPU, beside tools that say what theirs would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import gpu
    import gpu_jobs

SCRIPT = ROOT / "benchmarks/gpu.py"

NVIDIA_SMI = "echo 'NVIDIA H200, 9.0, 580.1, 1980, 3201, 40, [N/A]'"
CMAKE = '[ "$1" = -S ] || (mkdir "$2" && touch "$2/_C_cuda.abi3.so")'
# The command begins behind options that all have a value.
CLEAN = """
echo "$@"
while [ "${1#--}" != "$1" ]; do shift 2; done
"$@" && echo '========= ERROR SUMMARY: 0 errors'
"""
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
NOT_SUPPORTED = "compute-sanitizer does not support this device"


class Machine:
    """A PATH with tools of ours, and a pip that installs nothing."""

    def __init__(self, folder: Path):
        self.tools, self.out, self.site, self.built = (
            folder / name for name in ("bin", "out", "site", "built")
        )
        self.tools.mkdir()
        (self.site / "pip").mkdir(parents=True)
        (self.site / "pip/__init__.py").touch()
        self.pip("import sys; print(*sys.argv[1:])")
        self.tool("nvidia-smi", NVIDIA_SMI)
        self.tool("cmake", CMAKE)
        self.tool("nvcc", "true")

    def tool(self, name: str, script: str) -> None:
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def pip(self, program: str) -> None:
        (self.site / "pip/__main__.py").write_text(program)

    def at_import(self, statements: str) -> None:
        """What happens where a case imports fusedrl; an installed one is found by a hook, too."""
        lines = "".join(f"            {line}\n" for line in statements.splitlines())
        (self.site / "sitecustomize.py").write_text(
            "import sys\n"
            "class Broken:\n"
            "    def find_spec(self, name, path=None, target=None):\n"
            f"        if name == 'fusedrl':\n{lines}"
            "sys.meta_path.insert(0, Broken())\n"
        )

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join((str(self.tools), "/usr/bin", "/bin"))
        return os.environ | {"PATH": path, "PYTHONPATH": str(self.site)}

    @property
    def options(self) -> list[str | Path]:
        return ["--rehearse", "--out", self.out, "--build", self.built]

    def run(self, part: str, *arguments: str, status: int = 0) -> dict[str, tuple[str, str]]:
        """How the cases of the parts ended, and why."""
        command = [SCRIPT, "--part", part, *self.options, *arguments]
        done = programs.python(*command, env=self.environment)
        assert done.returncode == status, done.stdout + done.stderr
        self.said = done.stdout
        found = [x for x in self.records() if x["part"] in part.split(",")]
        return {x["case"]: (x["outcome"], x["why"]) for x in found}

    def records(self) -> list[dict]:
        records = [json.loads(line) for line in (self.out / "gpu.jsonl").read_text().splitlines()]
        assert all(record["rehearsal"] for record in records)
        return records


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_build_that_fails_stops_everything(machine):
    machine.pip("raise SystemExit('no compiler')")
    everything = "bench,check,profile,build"
    assert machine.run(everything, status=1) == {
        "package": ("failed", "exit status 1: no compiler")
    }
    assert {record["part"] for record in machine.records()} == {"machine", "build"}


def test_a_build_is_made_once_for_its_sources(machine):
    assert machine.run("build") == {"package": ("passed", "")}
    log = (machine.out / "build.log").read_text()
    assert "--no-index --no-deps --no-build-isolation" in log.replace("\n", " ")
    assert f"--target {machine.built}/site" in log and str(ROOT) in log
    machine.pip("raise SystemExit('built again')")
    assert machine.run("build") == {"package": ("passed", "it is there")}


def test_without_time_everything_is_said_to_be_skipped(machine):
    found = machine.run(",".join(gpu.PARTS), "--seconds", "0")
    sweeps = {f"sweep {variant}" for variant in gpu.VARIANTS}
    assert found.keys() == {"package", *gpu.CHECKS, *gpu.JOBS, *sweeps, *gpu.MAIN_KERNELS}
    assert set(found.values()) == {("skipped", "no time is left")}


def test_tools_that_are_not_there_are_skipped(machine):
    (machine.tools / "nvcc").unlink()
    checks = ("memcheck", "racecheck", "initcheck", "synccheck")
    cases = {
        **dict.fromkeys(checks, "compute-sanitizer"),
        **dict.fromkeys([f"sweep {variant}" for variant in gpu.VARIANTS], "nvcc"),
        **dict.fromkeys(gpu.MAIN_KERNELS, "ncu"),
    }
    chosen = [word for case in cases for word in ("--only", case)]
    found = machine.run("check,bench,profile", *chosen)
    assert found == {case: ("skipped", f"{tool} is not on PATH") for case, tool in cases.items()}


def test_the_sanitizer_runs_the_main_kernels(machine):
    machine.tool("compute-sanitizer", CLEAN)
    assert machine.run("check", "--only", "synccheck") == {"synccheck": ("passed", "")}
    log = (machine.out / "check.log").read_text()
    assert "--tool synccheck" in log
    assert all(job in log for job in gpu.MAIN_KERNELS.values())


def test_a_finding_in_a_kernel_of_ours_fails_and_is_looked_for_alone(machine):
    machine.tool("compute-sanitizer", RACE)
    found = machine.run("check", "--only", "racecheck", status=1)
    alone = [f"racecheck, {job}" for job in dict.fromkeys(gpu.MAIN_KERNELS.values())]
    assert found == dict.fromkeys(["racecheck", *alone], ("failed", "in policy_rows"))
    assert machine.records()[-1]["found"] == 3


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        (OF_OTHERS, ("passed", "2 findings in kernels of others")),
        ("echo 'Device not supported'; exit 1", ("skipped", NOT_SUPPORTED)),
        ("echo broken; exit 3", ("failed", "exit status 3: broken")),
    ],
)
def test_what_else_the_sanitizer_may_say(machine, says, outcome):
    machine.tool("compute-sanitizer", says)
    found = machine.run("check", "--only", "initcheck", status=int(outcome[0] == "failed"))
    assert found["initcheck"] == outcome


def test_a_file_of_gpu_tests_runs(machine):
    """Without a GPU it skips them, and what pytest says of each is counted."""
    file = "tests/ops/test_cuda_top_k_kl.py"
    assert machine.run("check", "--only", file)[file] == (
        "skipped",
        "none of its tests runs here",
    )
    assert machine.records()[-1]["tests"].keys() == {"SKIPPED"}


def test_files_whose_libraries_are_not_there_are_skipped(machine):
    machine.at_import("import torchrl_is_not_there")
    file = "tests/ops/test_cuda_top_k_kl.py"
    found = machine.run("check", "--only", file)
    assert found == {file: ("skipped", "torchrl_is_not_there is not installed")}


def test_every_file_of_gpu_tests_is_among_the_checks():
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text())
    }
    assert marked == {case for case in gpu.CHECKS if case.endswith(".py")}


def test_ops_are_measured_beside_predictions(machine):
    found = machine.run("bench", "--only", "linear_policy_loss", "--only", "TileElements=32")
    assert list(found) == [
        *("linear_policy_loss", "sweep TileElements=32"),
        *("linear_policy_loss, TileElements=32", "linear_token_log_probs, TileElements=32"),
    ]
    assert {outcome for outcome, _ in found.values()} == {"passed"}
    measured = [record for record in machine.records() if "ms" in record]
    for record in measured:
        assert record["least_ms"] <= record["ms"] <= record["most_ms"]
        assert record["copy_gb_s"] > 0 and record["product_tflop_s"] > 0
        assert record["machine"]["driver_version"] == "580.1"
        rows = [
            step.name
            for step in gpu.JOBS[record["case"].split(",")[0]].steps(gpu_jobs.ONCE["tiny"][0])
        ]
        assert (
            record["predicted_ms"].keys() - {gpu_jobs.REST}
            == set(rows) & gpu_jobs.model.KERNELS.keys()
        )
    table = (machine.out / "predictions.md").read_text()
    assert table in machine.said
    assert table.count("| 1980 MHz |") == len(measured) == 3
    sizes = (machine.built / "TileElements=32/csrc/common/tile_sizes.h").read_text()
    assert "kTileElements = int64_t(32) << 20" in sizes
    assert {x.parent.name for x in machine.built.glob("*/csrc/*/cuda.cu")} == set(gpu.SWEPT)


def test_a_variant_that_is_not_built_is_not_measured(machine):
    machine.tool("cmake", "exit 1")
    found = machine.run("bench", "--only", "TileElements=32", status=1)
    assert found == {"sweep TileElements=32": ("failed", "no library")}


def test_a_process_that_a_case_breaks_is_replaced(machine):
    """As by a hang, which SIGALRM ends, and by an error."""
    machine.at_import(
        "import os, pathlib\n"
        "seen = pathlib.Path(__file__).with_name('seen')\n"
        "if not seen.exists():\n"
        "    seen.touch()\n"
        "    os.kill(os.getpid(), 14)\n"
        "raise ValueError('no op')"
    )
    jobs = ["token_log_probs, entropy", "exact_kl, mixture"]
    found = machine.run("bench", "--only", jobs[0], "--only", jobs[1], status=1)
    assert found == {
        "token_log_probs, entropy": ("failed", "signal 14: it said nothing"),
        "exact_kl, mixture": ("failed", "ValueError: no op"),
    }


@pytest.mark.parametrize(
    ("says", "outcome"),
    [
        (COUNTED, ("passed", "")),
        ("true", ("failed", "ncu counted no kernel")),
        ("exit 5", ("failed", "exit status 5: it said nothing")),
    ],
)
def test_kernels_are_profiled_one_by_one(machine, says, outcome):
    machine.tool("ncu", f'{says}; echo "$@"' if says == "true" else says)
    found = machine.run("profile", "--only", "policy_rows", status=int(outcome[0] == "failed"))
    assert found == {"policy_rows": outcome}
    counted = {"dram__bytes_read.sum byte": "1,024"} if outcome[0] == "passed" else {}
    assert machine.records()[-1]["counted"] == counted


def test_a_profiler_without_permission_is_asked_once(machine):
    machine.tool("ncu", "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1")
    found = machine.run("profile")
    why = "ncu may not read the counters here: ERR_NVGPUCTRPERM"
    assert found == dict.fromkeys(gpu.MAIN_KERNELS, ("skipped", why))
    assert (machine.out / "profile.log").read_text().count("ERROR") == 1


def test_a_kill_in_the_middle_leaves_whole_lines(machine):
    command = [sys.executable, SCRIPT, "--part", "bench", *machine.options]
    process = subprocess.Popen(command, env=machine.environment, stdout=subprocess.DEVNULL)
    results, deadline = machine.out / "gpu.jsonl", time.monotonic() + 300
    try:
        while "linear_policy_loss" not in (results.read_text() if results.exists() else ""):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()
    known = machine.records()
    assert [record["case"] for record in known[2:3]] == ["linear_policy_loss"]
    assert len(known) < 2 + len(gpu.JOBS)
    time.sleep(2)
    assert machine.records() == known  # what ran has ended with it


def test_a_rehearsal_writes_no_results(machine):
    machine.out = ROOT / "benchmarks/results/rehearsed"
    done = programs.python(SCRIPT, *machine.options, env=machine.environment)
    assert done.returncode == 2 and "outside of benchmarks/results" in done.stderr
    assert not machine.out.exists()


def test_no_gpu_is_an_error_without_a_rehearsal(machine):
    done = programs.python(SCRIPT, "--out", machine.out, env=machine.environment)
    assert done.returncode == 2 and "--rehearse does without" in done.stderr
    assert not machine.out.exists()


@pytest.mark.parametrize("name", gpu.JOBS)
def test_each_job_is_predicted_by_the_kernels_that_it_runs(name):
    """Also those that tools are told to look at, at the shape that is measured on a GPU."""
    job = gpu.JOBS[name]
    predicted = gpu_jobs.predicted(job.steps(job.shape), gpu_jobs.model.H200)
    assert all(time > 0 for time in predicted.values())
    assert {kernel for kernel, of in gpu.MAIN_KERNELS.items() if of == name} <= predicted.keys()


@pytest.mark.parametrize("variant", gpu.VARIANTS)
def test_each_variant_is_a_size_that_the_model_knows_and_another_one(variant):
    size, value = variant.split("=")
    assert gpu_jobs.model.SIZES[size] != int(value) << 20


def test_kernels_are_told_apart_by_their_names(monkeypatch):
    def event(name, milliseconds, device="CUDA"):
        time_range = SimpleNamespace(elapsed_us=lambda: 1e3 * milliseconds)
        of = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=of, time_range=time_range)

    events = [
        event("void fusedrl::policy_rows<false, c10::BFloat16>(fusedrl::Tile<c10::BFloat16>)", 1),
        event("void fusedrl::(anonymous namespace)::policy_rows<true, float>(float*)", 2),
        event("void at::native::vectorized_elementwise_kernel<4, policy_rows>(int)", 4),
        event("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 8),
        event("Memcpy DtoD (Device -> Device)", 16),
        event("fusedrl::linear_policy_loss", 32, "CPU"),
    ]
    profiled = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr("torch.profiler.profile", lambda activities: profiled)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    times = gpu_jobs._kernel_times(lambda: None, "cuda", ["policy_rows"])
    assert times == {"policy_rows": 3, gpu_jobs.REST: 28}
