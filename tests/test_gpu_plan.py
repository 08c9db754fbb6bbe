"""`make gpu` without a GPU: its plans beside tools that answer, sleep, crash and flood."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[1]
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "benchmarks")
    import gpu
    import gpu_jobs

SCRIPT = ROOT / "benchmarks/gpu.py"
NVIDIA_SMI = "echo 'NVIDIA H100 80GB HBM3, 9.0, 580.1, 1980, 2619, 40, [N/A]'"
PYTHON = """
case "$*" in
*pytest*) echo 'tests/ops/test_cuda.py::test_one[1-2] PASSED [ 50%]' ;;
*) echo "$@" ;;
esac
"""
SANITIZER = "echo '========= ERROR SUMMARY: 0 errors'"
NCU = """
echo '==PROF== Profiling "differentiate_tile": 0%....100%'
echo '"ID","Kernel Name","dram__bytes_read.sum","other"'
echo '"","","byte","%"'
echo '"0","void at::native::reduce_kernel<512>(T)","7","5"'
for kernel in differentiate_tile forward_rows; do
    echo '"1","void fusedrl::<unnamed>::'$kernel'<(bool)0>(Rows)","9","5"'
    echo '"2","void fusedrl::(anonymous namespace)::'$kernel'<false>(Rows)","1,024","5"'
done
"""
RACE = """
echo '========= Error: Race reported between Write access at void fusedrl::forward_rows<false>'
echo '=========     Host Frame: fusedrl::add_tile in _C_cuda.abi3.so'
echo '========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)'
exit 9
"""
OF_OTHERS = """
echo '========= Uninitialized __global__ memory read of size 4 bytes at void gemm_kernel'
echo '========= ERROR SUMMARY: 2 errors'
exit 9
"""
# In the group of the command, and out of it.
SLEEP = "echo begun; sleep 1000 & setsid sleep 1000 & sleep 1000"
FLOOD = "yes 'a flood of output'"
CRASH = "echo begun; kill -SEGV $$"


class Machine:
    """A PATH with tools of ours, of which one is the Python that everything runs in."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch):
        self.tools = folder / "bin"
        self.tools.mkdir()
        patch.setenv("PATH", f"{self.tools}{os.pathsep}/usr/bin{os.pathsep}/bin")
        patch.setattr(gpu, "WHEELS", folder / "wheels")
        patch.setattr(gpu, "ASKED", 0.2)
        scripts = {"ncu": NCU, "compute-sanitizer": SANITIZER}
        for name, script in {**scripts, "python": PYTHON, "nvidia-smi": NVIDIA_SMI}.items():
            self.tool(name, script)
        self.to = gpu.Bench(folder / "out", folder / "built", rehearsal=True)
        self.to.python, self.to.device = str(self.tools / "python"), "cuda"

    def tool(self, name: str, script: str) -> None:
        path = self.tools / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def follow(self, minutes: int, caps: dict[str, float] | None = None, only: str = "") -> int:
        """The plan, with other seconds for some steps."""
        caps = caps or {}
        plan = [step for step in gpu.PLANS[minutes] if only in step.name]
        return gpu.follow(
            tuple(step._replace(seconds=caps.get(step.name, step.seconds)) for step in plan),
            self.to,
        )

    def steps(self) -> dict[str, tuple[str, str]]:
        """How the steps ended, and why."""
        return {x["step"]: (x["outcome"], x["why"]) for x in self.records() if "step" in x}

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.to.results.read_text().splitlines()]

    def took(self, step: str) -> float:
        return next(x["seconds"] for x in self.records() if x.get("step") == step)

    @property
    def log(self) -> str:
        return (self.to.out / "gpu.log").read_text()


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path, monkeypatch)


def test_plans_end_before_their_minutes_and_begin_with_what_is_worth_most():
    assert sum(step.seconds for step in gpu.PLANS[10]) <= 560  # and ten more to start and to report
    assert sum(step.seconds for step in gpu.PLANS[4]) <= 235
    first = [step.name for step in gpu.PLANS[10]][:4]
    assert first == ["build", "fusedrl check", "tests of the channel", "steps of trainers"]


@pytest.mark.parametrize("minutes", gpu.PLANS)
def test_every_step_is_recorded(machine, minutes):
    assert machine.follow(minutes) == 0
    ended = {name: how for name, (how, _) in machine.steps().items()}
    assert ended == {step.name: "passed" for step in gpu.PLANS[minutes]}
    for record in machine.records():
        assert record["rehearsal"] and record["seconds"] < 30


def test_every_file_of_gpu_tests_every_job_and_the_check_runs(machine):
    machine.follow(10)
    machine.follow(4)
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"pytest\.mark\.gpu\b", path.read_text())
    }
    assert set(re.findall(r"tests/\S+\.py", machine.log)) == marked
    assert "-m fusedrl check" in machine.log
    for job in gpu_jobs.JOBS:
        assert re.search(rf"measure .*{job}", machine.log), job


# What becomes of a step whose tool does so: how, and what is said first.
FAULTS = {
    "sleeps": (SLEEP, "unfinished", "not done in its time: begun"),
    "floods": (FLOOD, "unfinished", "not done in its time: a"),
    "crashes": (CRASH, "failed", "signal 11: begun"),
}
# The tool of a step, and what is among its arguments there alone.
TOOLS = {"publish": ("python", "publish"), "memcheck": ("compute-sanitizer", "memcheck")}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("step", TOOLS)
def test_a_step_costs_no_more_than_its_time_and_a_bounded_log(machine, step, fault):
    """The others have theirs, as if nothing had happened, and nothing is tried again."""
    (tool, among), (script, how, why) = TOOLS[step], FAULTS[fault]
    healthy = (machine.tools / tool).read_text()
    machine.tool(tool, f'case "$*" in *"{among}"*)\n{script}\nexit;; esac\n{healthy}')
    minutes = 4 if step == "memcheck" else 10
    began = time.monotonic()
    assert machine.follow(minutes, {step: 1.0}) == 1
    assert time.monotonic() - began < 60
    found = machine.steps()
    assert found[step][0] == how and found[step][1].startswith(why)
    assert {name for name, (how, _) in found.items() if how != "passed"} == {step}
    assert found.keys() == {step.name for step in gpu.PLANS[minutes]}
    assert machine.took(step) < 10
    assert (machine.to.out / "gpu.log").stat().st_size < 3 * gpu.LOGGED
    if fault == "floods":
        assert "bytes left out]" in machine.log
    assert not started_by_steps()


def started_by_steps() -> list[str]:
    """The processes that are left."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FUSEDRL_GPU_STEP={os.getpid()}-".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
    return found


def test_a_build_that_fails_stops_everything(machine):
    machine.tool("python", "echo no compiler; exit 1")
    assert machine.follow(10) == 1
    assert machine.steps() == {"build": ("failed", "exit status 1: no compiler")}


def test_a_build_is_made_once_for_its_sources(machine):
    assert machine.follow(10, only="build") == 0
    assert "--no-index --no-build-isolation --no-deps" in machine.log
    assert f"--target {machine.to.site}" in machine.log and str(ROOT) in machine.log
    assert "cmake.define.FUSEDRL_CUDA_ARCHS=90-real" in machine.log
    machine.tool("python", "echo built again; exit 1")
    assert machine.follow(4, only="build") == 0
    assert machine.steps() == {"build": ("passed", "it is there")}


def test_tools_that_are_not_there_are_skipped(machine):
    for tool in ("ncu", "compute-sanitizer"):
        (machine.tools / tool).unlink()
    for step in ("ncu", "memcheck", "racecheck"):
        assert machine.follow(4, only=step) == 0
    assert {how for how, _ in machine.steps().values()} == {"skipped"}
    assert machine.steps()["ncu"] == ("skipped", "ncu is not on PATH")


# A step, its tool, what that says, and what is made of it.
SAID = [
    ("ncu", "ncu", "true", "failed: counted none of differentiate_tile"),
    ("ncu", "ncu", "exit 5", "failed: exit status 5: it said nothing"),
    ("ncu", "ncu", "echo '==ERROR== ERR_NVGPUCTRPERM'; exit 1", "skipped: ncu may not read"),
]
SANITIZED = [
    (RACE, "failed: in forward_rows"),
    (RACE.replace("exit 9", "sleep 1000"), "failed: in forward_rows"),
    (OF_OTHERS, "passed: 2 findings in kernels of others"),
    ("echo 'Device not supported'; exit 1", "skipped: compute-sanitizer does not support this"),
    ("echo broken; exit 3", "failed: exit status 3: broken"),
    (
        OF_OTHERS.replace("exit 9", "echo 'Target application returned an error'; exit 9"),
        "failed: exit status 9: Target application returned an error",
    ),
]
TESTED = [
    ("echo 'tests/a.py::b FAILED [ 1%]'; exit 1", "failed: .*1 of 1 tests, tests/a.py::b first"),
    ("echo 'tests/a.py::b SKIPPED (no vllm) [ 1%]'", "skipped: none of its tests runs here"),
    ("echo 'tests/a.py::b PASSED [ 1%]'; echo 'tests/a.py::c '; sleep 99", ".*tests/a.py::c"),
]
SLOWLY = [("racecheck", "compute-sanitizer", *said) for said in SANITIZED]
SLOWLY += [("graphs", "python", *said) for said in TESTED]


@pytest.mark.parametrize(
    ("step", "tool", "says", "outcome"),
    [*SAID, *(pytest.param(*said, marks=pytest.mark.slow) for said in SLOWLY)],
)
def test_what_a_tool_may_say(machine, step, tool, says, outcome):
    machine.tool(tool, says)
    minutes = 10 if step == "graphs" else 4
    failed = machine.follow(minutes, {"racecheck": 1.0, "graphs": 5.0}, only=step)
    how, why = machine.steps()[step]
    assert re.match(outcome, f"{how}: {why}"), (how, why)
    assert failed == int(how not in ("passed", "skipped"))


def test_the_profiler_counts_the_last_launch_of_each_kernel(machine):
    machine.tool("ncu", "echo 'UserWarning: Failed to initialize NumPy'" + NCU)
    machine.follow(4, only="ncu")
    (record,) = machine.records()
    counted = {"dram__bytes_read.sum byte": "1,024"}
    assert record["counted"] == dict.fromkeys(gpu.COUNTED, counted)


@pytest.mark.parametrize(
    "beside", ["nothing", *(pytest.param(x, marks=pytest.mark.slow) for x in ("torch", "peers"))]
)
def test_jobs_are_measured_beside_others(machine, beside):
    jobs = gpu_jobs.JOBS if beside == "nothing" else gpu_jobs.HEADLINES
    arguments = (*jobs, "--beside", beside, "--device", "cpu", "--tiny")
    done = programs.python(
        SCRIPT.with_name("gpu_jobs.py"), "measure", *arguments, "--results", machine.to.results
    )
    if beside == "peers":  # which need a GPU
        assert done.returncode == gpu_jobs.NOTHING, done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    records = machine.records()
    assert [record["job"] for record in records] == list(jobs)
    for record in records:
        ours, *others = record["rows"]
        assert ours["contender"] == "fusedrl" and ours["median_ms"] > 0
        assert bool(others) == (beside == "torch")
        assert record["machine"]["driver_version"] == "580.1"
        assert record["differs"] is None if beside == "nothing" else record["differs"] < 0.05
        assert f"{record['job']}: fusedrl {ours['median_ms']:.3g} ms" in done.stdout
    assert gpu.model.measured(records) == {}  # of shapes that say nothing
    found = gpu.model.measured([record | {"tiny": False} for record in records])
    linear = {name for name in gpu_jobs.HEADLINES if name.startswith("linear")}
    assert found.keys() == (linear if beside == "torch" else set())


def test_a_publish_is_timed_until_another_process_has_computed_with_it(machine):
    done = programs.python(
        *(SCRIPT.with_name("gpu_jobs.py"), "publish", "--device", "cpu", "--tiny"),
        *("--results", machine.to.results),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = machine.records()
    assert record["bytes"] == 10**6
    assert 0 < record["publish_ms"] < record["computed_ms"]


@pytest.mark.parametrize("name", gpu_jobs.JOBS)
def test_each_job_is_predicted_by_the_kernels_that_it_runs(name, monkeypatch):
    """Also those that ncu is told to look at, at the shape that is measured on a GPU."""
    job = gpu_jobs.JOBS[name]
    steps = job.steps(job.shape)
    names = {step.name for step in steps if step.name in gpu_jobs.model.KERNELS}
    monkeypatch.setattr(gpu_jobs, "_kernel_times", lambda run, names: dict.fromkeys(names, 2.0))
    times = gpu_jobs._kernels(lambda: None, "cuda", steps, {"name": "NVIDIA H100 80GB HBM3"})
    assert times.keys() == names
    assert all(x["predicted_ms"] > 0 and x["share"] > 0 for x in times.values())
    assert {kernel for kernel, of in gpu.COUNTED.items() if of == name} <= times.keys()


def test_kernels_are_told_apart_by_their_names(monkeypatch):
    def event(name, milliseconds, device="CUDA"):
        time_range = SimpleNamespace(elapsed_us=lambda: 1e3 * milliseconds)
        of = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=of, time_range=time_range)

    events = [
        event(
            "void fusedrl::differentiate_tile<false, c10::BFloat16>(fusedrl::Tile<c10::BFloat16>)",
            1,
        ),
        event("void fusedrl::(anonymous namespace)::differentiate_tile<true, float>(float*)", 2),
        event("void at::native::vectorized_elementwise_kernel<4, differentiate_tile>(int)", 4),
        event("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 8),
        event("Memcpy DtoD (Device -> Device)", 16),
        event("fusedrl::token_log_probs", 32, "CPU"),
    ]
    profiled = contextlib.nullcontext(SimpleNamespace(events=lambda: events))
    monkeypatch.setattr("torch.profiler.profile", lambda activities: profiled)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert gpu_jobs._kernel_times(lambda: None, ["differentiate_tile"]) == {"differentiate_tile": 3}
