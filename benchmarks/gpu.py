"""What a machine with a GPU is needed for, on one that is there for fifteen minutes.

``make gpu MINUTES=10``, then ``make gpu MINUTES=4``: a plan is a list of steps, the most valuable
first. A step is killed when its seconds are over, with all that it started, and what it left over
goes to the last one. Its outcome is a line of ``gpu.jsonl``, on disk when the next begins. The
package is built into build/gpu, by and for the interpreter that runs this, without network.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import hashlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import gpu_model as model
import torch
from gpu_jobs import HEADLINES, NOTHING, OTHERS, append, machine

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "build/gpu-wheels"  # of what PY may lack, by `make gpu-wheels`
SOURCES = ("pyproject.toml", "CMakeLists.txt", "cmake", "csrc", "setup_helpers", "python")
LOGGED = 200_000  # bytes of what a command prints: its first ones, and its last ones
ASKED = 2.0  # seconds before a command is killed: by Ctrl-C, so that pytest tells of failures
# The kernels that ncu counts with the jobs that run them.
COUNTED = {
    "differentiate_tile": "linear_token_log_probs",
    "forward_rows": "token_log_probs",
}
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "smsp__inst_executed.sum",
    "launch__registers_per_thread",
)
# What the sanitizer says of a program that did not run to its end.
CUT_SHORT = r"did not terminate successfully|application returned an error"


class Outcome(NamedTuple):
    """How a step ended: passed, failed, unfinished (its time was over) or skipped."""

    how: str
    why: str = ""
    figures: Mapping[str, Any] = MappingProxyType({})


class Ended(NamedTuple):
    """How a command ended: without status if the time of its step was over."""

    status: int | None
    text: str

    def outcome(self) -> Outcome:
        """What it says of the step."""
        said = [line.strip() for line in self.text.splitlines() if line.strip()]
        last = said[-1][:300] if said else "it said nothing"
        if self.status is None:
            return Outcome("unfinished", f"not done in its time: {last}")
        if self.status in {0, NOTHING}:
            return Outcome("skipped" if self.status else "passed", last)
        how = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return Outcome("failed", f"{how}: {last}")


class Bench:
    """Where the package is built and the results go, and when the step that runs has to end."""

    def __init__(self, out: Path, built: Path = ROOT / "build/gpu", rehearsal: bool = False):
        self.out, self.built, self.site = out.resolve(), built, built / "site"
        self.rehearsal, self.python = rehearsal, sys.executable
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.results, self.deadline = self.out / "gpu.jsonl", 0.0
        self.out.mkdir(parents=True, exist_ok=True)

    def run(self, *command: object, **environment: str) -> Ended:
        """Run a command on the package that was built, until the time of the step is over."""
        words = [str(word) for word in command]
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        mark = f"FUSEDRL_GPU_STEP={os.getpid()}-{time.monotonic_ns()}"
        name, _, value = mark.partition("=")
        known = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
        known |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | known | environment | {name: value},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL),  # PR_SET_PDEATHSIG
        )
        try:
            with (self.out / "gpu.log").open("ab", buffering=0) as log:
                log.write(f"\n$ {shlex.join(words)}\n".encode())
                status, text = self._follow(process, log)
        finally:
            _kill(mark)
            with suppress(subprocess.TimeoutExpired):  # what waits for the driver cannot be killed
                process.wait(2)
            assert process.stdout is not None
            process.stdout.close()
        return Ended(status, text.decode(errors="replace"))

    def _follow(self, process: subprocess.Popen[bytes], log: Any) -> tuple[int | None, bytes]:
        """What it prints until it ends or has to: the beginning is logged at once, then the end."""
        assert process.stdout is not None
        head = tail = b""
        cut, asked, open_ = 0, False, True
        while (left := self.deadline - time.monotonic()) > 0:
            ended = process.poll() is not None
            if left < ASKED and not asked:
                process.send_signal(signal.SIGINT)
                asked = True
            if open_ and select.select([process.stdout], [], [], min(left, 0.05))[0]:
                some = os.read(process.stdout.fileno(), 1 << 16)
                open_, room = bool(some), LOGGED - len(head)
                log.write(some[:room])
                head, tail = head + some[:room], tail + some[room:]
                cut, tail = cut + max(len(tail) - LOGGED, 0), tail[-LOGGED:]
            elif ended:
                break
            elif not open_:
                time.sleep(min(left, 0.05))
        if cut:
            log.write(f"\n[{cut} bytes left out]\n".encode())
        log.write(tail)
        status = process.poll()
        return None if asked and status else status, head + tail

    def run_jobs(self, mode: str, *arguments: object) -> list[object]:
        """The command of ``gpu_jobs.py``, whose processes append to the same results."""
        script = Path(__file__).with_name("gpu_jobs.py")
        tiny = ["--tiny"] if self.rehearsal else []
        options = ("--device", self.device, *tiny, "--results", self.results)
        return [self.python, script, mode, *arguments, *options]


def _kill(mark: str) -> None:
    """Kill every process with a mark in its environment, whatever group or session it is in."""
    for _ in range(10):
        found = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark.encode() in path.read_bytes().split(b"\0"):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)


def build(to: Bench) -> Outcome:
    """Install the wheels that were carried, and build the package, for this GPU alone."""
    made_of = _digest(to)
    known = to.built / "made-of"
    if known.is_file() and known.read_text() == made_of:
        return Outcome("passed", "it is there", {"sources": made_of})
    shutil.rmtree(to.built, ignore_errors=True)
    pip = (to.python, "-m", "pip", "install", "--disable-pip-version-check", "--no-index")
    options = ("--no-deps", "--no-compile", "--upgrade", "--target", to.site)
    if wheels := sorted(WHEELS.glob("*.whl")):
        outcome = to.run(*pip, *options, *wheels).outcome()
        if outcome.how != "passed":
            return outcome
    defines = [f"--config-settings=cmake.define.{define}" for define in _defines(to)]
    outcome = to.run(*pip, "--no-build-isolation", *options, *defines, ROOT).outcome()
    if outcome.how == "passed":
        to.built.mkdir(parents=True, exist_ok=True)
        known.write_text(made_of)
    return outcome._replace(figures={"sources": made_of})


def _digest(to: Bench) -> str:
    """Of what a build is made of, by which results are known where git does not know a commit."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {_defines(to)}".encode())
    shipped = sorted(ROOT.glob("benchmarks/[!g]*.py"))  # not gpu*.py
    for source in (*(ROOT / name for name in SOURCES), *shipped, WHEELS):
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _defines(to: Bench) -> list[str]:
    """CMake's, for machine code of the GPU that is here."""
    architecture = machine().get("compute_cap", "").replace(".", "")
    on = ["FUSEDRL_CUDA=on", f"FUSEDRL_CUDA_ARCHS={architecture}-real"]
    return on if to.device == "cuda" else ["FUSEDRL_CUDA=off"]


def check(to: Bench) -> Outcome:
    """Every op against float64."""
    return to.run(to.python, "-m", "fusedrl", "check").outcome()


def tests(*arguments: str) -> Callable[[Bench], Outcome]:
    """The tests in some files that need a GPU."""

    def step(to: Bench) -> Outcome:
        pytest = (to.python, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider")
        ended = to.run(*pytest, "--grids", "-m", "gpu", *arguments)
        found = re.findall(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED)\b", ended.text, re.MULTILINE)
        counts = Counter(result for _, result in found)
        wrong = [name for name, result in found if result in {"FAILED", "ERROR"}]
        outcome = ended.outcome()._replace(figures={"tests": counts, "wrong": wrong[:100]})
        if wrong:
            why = f"{len(wrong)} of {len(found)} tests, {wrong[0]} first"
            return outcome._replace(how="failed", why=f"{why}; {outcome.why}")
        if ended.status in {0, 5} and not counts["PASSED"]:
            return outcome._replace(how="skipped", why="none of its tests runs here")
        return outcome

    return step


def measure(beside: str, *jobs: str) -> Callable[[Bench], Outcome]:
    """Jobs, timed beside others."""
    return lambda to: to.run(*to.run_jobs("measure", *jobs, "--beside", beside)).outcome()


def publish(to: Bench) -> Outcome:
    """A version of 1 GB, into the channel and to another process."""
    return to.run(*to.run_jobs("publish")).outcome()


def profile(to: Bench) -> Outcome:
    """What ncu counts of some kernels; it leaves the clocks as they are."""
    if shutil.which("ncu") is None:
        return Outcome("skipped", "ncu is not on PATH")
    ncu = ("ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none")
    chosen = ("--metrics", ",".join(METRICS), "-k", f"regex:^({'|'.join(COUNTED)})$")
    ended = to.run(*ncu, *chosen, *to.run_jobs("profile", *COUNTED.values()))
    refusal = r"==ERROR==.*(ERR_NVGPUCTRPERM|LibraryNotLoaded|Failed to initialize)"
    if (said := re.search(refusal, ended.text)) is not None:
        return Outcome("skipped", f"ncu may not read the counters here: {said[1]}")
    counted, outcome = _metrics(ended.text), ended.outcome()
    if outcome.how == "passed":
        why = f"counted {', '.join(counted) or 'none'} of {', '.join(COUNTED)}"
        outcome = Outcome("passed" if counted.keys() == COUNTED.keys() else "failed", why)
    return outcome._replace(figures={"counted": counted})


def _metrics(text: str) -> dict[str, dict[str, str]]:
    """The metrics of the last launch of each kernel, with their units behind their names."""
    names, units, *launches = list(
        csv.reader(line for line in text.splitlines() if line.startswith('"'))
    ) or ([], [])
    found = {}
    for launch in launches:
        row = dict(zip(names, launch, strict=False))
        kernel = re.search(r"(\w+)[<(]", row.get("Kernel Name", ""))
        if kernel is not None and kernel[1] in COUNTED:
            cells = zip(names, units, launch, strict=False)
            found[kernel[1]] = {f"{n} {u}".strip(): x for n, u, x in cells if n in METRICS}
    return found


def sanitize(tool: str) -> Callable[[Bench], Outcome]:
    """The main kernels under a tool; what it finds in kernels of others is counted, no failure."""

    def step(to: Bench) -> Outcome:
        if shutil.which("compute-sanitizer") is None:
            return Outcome("skipped", "compute-sanitizer is not on PATH")
        ended = to.run(
            *("compute-sanitizer", "--tool", tool, "--print-limit", 100, "--error-exitcode", 9),
            *to.run_jobs("small", *HEADLINES),
            PYTORCH_NO_CUDA_MEMORY_CACHING="1",  # or blocks hide an access past their end
        )
        if "Device not supported" in ended.text:
            return Outcome("skipped", "compute-sanitizer does not support this device")
        found = sum(int(n) for n in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", ended.text))
        lines = (line for line in ended.text.splitlines() if line.startswith("==="))
        told = "\n".join(line for line in lines if "Host Frame" not in line)
        ours = sorted(name for name in model.written_kernels() if name in told)
        outcome = ended.outcome()
        if ours:
            outcome = Outcome("failed", f"in {', '.join(ours)}")
        elif ended.status == 9 and found and not re.search(CUT_SHORT, ended.text):
            outcome = Outcome("passed", f"{found} findings in kernels of others")
        return outcome._replace(figures={"found": found, "kernels": ours})

    return step


def steps_of_users(to: Bench) -> Outcome:
    """A step of GRPO as torchrl's recipe takes it, and its parts."""
    options = ("--device", to.device, "--seconds", 1, "--limit", 75, "--out", to.out / "bench")
    ended = to.run(to.python, "-m", "fusedrl", "bench", "--op", "grpo_step", *options)
    outcome = ended.outcome()
    return outcome._replace(why=outcome.why.replace(f"{to.out}/", ""))  # which is of that machine


class Step(NamedTuple):
    """A part of a plan, and the most seconds that it may take."""

    name: str
    seconds: float
    run: Callable[[Bench], Outcome]


OF_OPS = (
    "tests/ops/test_cuda_linear.py",
    "tests/ops/test_cuda.py",
    "tests/ops/test_cuda_linear_exact_kl.py",
    "tests/ops/test_cuda_exact_kl.py",
)
OF_USERS = ("tests/integrations/test_gpu.py", "tests/collectors/test_gpu.py")
OTHER_TESTS = ("tests/models/test_cuda.py", "tests/engines/test_gpu.py", OF_OPS[0])
PLANS = {  # by the minutes that they end in
    10: (
        Step("build", 50, build),
        Step("fusedrl check", 20, check),
        Step("tests of the channel", 60, tests("tests/channel/test_cuda_gpu.py")),
        Step("steps of trainers", 90, tests(*OF_USERS)),
        Step("publish", 25, publish),
        Step("tests of ops", 50, tests(*OF_OPS, "-k", "not triton")),
        *(Step(job, 18, measure("torch", job)) for job in HEADLINES),
        Step("graphs", 40, tests("tests/ops/test_cuda_capture.py")),
        Step("other tests", 50, tests(*OTHER_TESTS, "-k", "triton or models or engines")),
        Step("times of trainers", 85, steps_of_users),
    ),
    4: (
        Step("build", 60, build),  # where MINUTES=10 did not build
        Step("peers", 70, measure("peers", *HEADLINES)),
        Step("memcheck", 25, sanitize("memcheck")),
        Step("racecheck", 30, sanitize("racecheck")),
        Step("ncu", 15, profile),
        Step("other timings", 30, measure("nothing", *OTHERS)),
    ),
}


def follow(plan: tuple[Step, ...], to: Bench) -> int:
    """Take the steps one after the other; 0 if none failed and all ended in their time."""
    start = time.monotonic()
    end, worst = start + sum(step.seconds for step in plan), 0
    for step in plan:
        began = time.monotonic()
        to.deadline = end if step is plan[-1] else began + step.seconds
        try:
            outcome = step.run(to)
        except Exception as error:
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        how, why, figures = outcome
        now = time.monotonic()
        known = {"step": step.name, "outcome": how, "why": why, "rehearsal": to.rehearsal}
        append(to.results, {**known, "seconds": round(now - began, 1), **figures})
        print(f"gpu: {now - start:4.0f} s: {step.name}: {how}{why and f': {why}'}", flush=True)
        worst = max(worst, how in {"failed", "unfinished"})
        if step.run is build and how != "passed":
            break
    return worst


def main() -> int:
    """Follow a plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, choices=PLANS, default=10)
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="default: %(default)s")
    parser.add_argument("--rehearse", action="store_true", help="on tiny shapes, without a GPU too")
    args = parser.parse_args()
    if not args.rehearse and not (torch.cuda.is_available() and machine()):
        parser.error("expected a GPU of torch's and nvidia-smi's; --rehearse does without")
    if find_spec("fusedrl") is not None:
        parser.error(
            "expected a Python without fusedrl, which may hide what is built; name another"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C, so that children end
    to = Bench(args.out, rehearsal=args.rehearse)
    here = machine() | {"torch": torch.__version__, "cuda": torch.version.cuda}
    append(to.results, {"machine": here, "plan": args.minutes, "rehearsal": args.rehearse})
    status = follow(PLANS[args.minutes], to)
    found = {here.get("name", "here"): model.measured(model.read(to.results))}
    tables = f"{model.row_table(found)}\n\n{model.linear_table(found)}\n"
    (to.out / "measured.md").write_text(tables)
    print(tables)
    return status


if __name__ == "__main__":
    sys.exit(main())
