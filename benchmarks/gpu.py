"""What a machine with a GPU is needed for, in slices: ``make gpu PART=build,check,bench,profile``.

A slice ends within its seconds, and starts no case when they are over. The outcome of each case is
a line of ``gpu.jsonl``, written when it is known, so that a kill loses the case that runs; the most
valuable come first. Cases run in processes of their own, since no kernel can be launched after one
that accessed memory that is not there. The package is built into build/gpu, by and for the
interpreter that runs this, without network. ``--rehearse`` takes the same way on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import gpu_model as model
import torch
from gpu_jobs import JOBS, NO_TIME, Results, case_of, machine

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "CMakeLists.txt", "cmake", "csrc", "setup_helpers", "python")
SECONDS = 540.0  # of a slice, of which a case may take at most:
LIMITS = {"build": 420.0, "check": 150.0, "variants": 200.0, "profile": 60.0}
LOGGED = 200_000  # characters of what a case prints, its last ones

CHECKS = (
    "fusedrl check",
    "tests/ops/test_cuda_capture.py",
    "tests/ops/test_cuda_linear.py",
    "tests/ops/test_cuda.py",
    "memcheck",
    "racecheck",
    "tests/ops/test_cuda_linear_exact_kl.py",
    "tests/ops/test_cuda_exact_kl.py",
    "tests/ops/test_cuda_top_k_kl.py",
    "tests/ops/test_cuda_importance_weights.py",
    "initcheck",
    "synccheck",
    "tests/models/test_cuda.py",
    "tests/channel/test_cuda_gpu.py",
    "tests/engines/test_gpu.py",
)
# The kernels that take most of the time, and the job that runs each of them.
MAIN_KERNELS = {
    "policy_rows": "linear_policy_loss",
    "add_tile": "linear_token_log_probs",
    "differentiate_tile": "linear_token_log_probs",
    "forward_rows": "token_log_probs",
    "backward_rows": "token_log_probs",
    "add_pair_tile": "linear_exact_kl",
    "differentiate_pair_tile": "linear_exact_kl",
    "forward_pairs": "exact_kl",
    "backward_pairs": "exact_kl",
    "split_rows": "top_k_kl",
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
# Sizes of csrc/common/tile_sizes.h, in units of 2^20 elements, and the ops that they matter to. The
# rows of a tile of `linear_policy_loss` are TileElements divided by the number of classes.
VARIANTS = (
    "TileElements=32",
    "TileElements=128",
    "TileElements=256",
    "GradientElements=1024",
    "TermElements=64",
)
SWEPT = ("linear_policy_loss", "linear_token_log_probs")


class Ended(NamedTuple):
    """How a process ended: without status if its time was over."""

    status: int | None
    text: str

    def outcome(self) -> tuple[str, str]:
        """What to record of the case that it was, and why."""
        if self.status == 0:
            return "passed", ""
        if self.status is None:
            return "failed", "not done in its time"
        how = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        said = [line for line in self.text.splitlines() if line.strip()]
        return "failed", f"{how}: {said[-1].strip()[:300] if said else 'it said nothing'}"


class Slice:
    """What a command runs, where its results go, and how much of its time is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.out, self.only = args.out.resolve(), args.only
        self.built = args.build.resolve()
        self.site = self.built / "site"
        self.device = "cpu" if args.rehearse else "cuda"
        self.results = Results(self.out / "gpu.jsonl", args.rehearse)
        self.end = time.monotonic() + args.seconds
        self.failed = False

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def record(self, part: str, case: str, outcome: str, why: str = "", **figures: Any) -> None:
        """Say how a case ended."""
        self.failed = self.failed or outcome == "failed"
        self.results.add(part, case, outcome, why, **figures)

    def outcome(self, ended: Ended) -> tuple[str, str]:
        """What to record of a case; one that the end of the slice cut off did not fail."""
        if ended.status is None and self.left() <= 0:
            return "skipped", "cut off when the time was over"
        return ended.outcome()

    def asked(self, part: str, cases: Collection[str]) -> Iterator[str]:
        """The cases that are asked for, while time is left; of the others it is said."""
        for case in cases:
            if any(name in case for name in self.only or [case]):
                if self.left() > 0:
                    yield case
                else:
                    self.record(part, case, "skipped", NO_TIME)

    def run(self, log: str, limit: float, *command: object, **environment: str) -> Ended:
        """Run a command on the package that was built; what it starts ends with it."""
        path = os.pathsep.join(filter(None, (str(self.site), os.environ.get("PYTHONPATH"))))
        with (self.out / log).open("a+b") as file:
            start = file.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [str(part) for part in command],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(min(limit, max(self.left(), 0.1)))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            file.seek(start)
            text = file.read().decode(errors="replace")[-LOGGED:]
            file.truncate(start)
            file.write(text.encode())
        return Ended(status, text)

    def run_jobs(self, mode: str, *jobs: str) -> list[object]:
        """The command that does so."""
        script = Path(__file__).with_name("gpu_jobs.py")
        return [sys.executable, script, mode, *jobs, "--device", self.device]


def build(to: Slice) -> bool:
    """Build the package for this GPU, unless it was built of these sources; whether to go on."""
    made_of = f"{to.device} {_digest()}"
    known = to.built / "made-of"
    if known.is_file() and known.read_text() == made_of:
        to.record("build", "package", "passed", "it is there", sources=made_of)
        return True
    if to.left() <= 0:
        to.record("build", "package", "skipped", NO_TIME)
        return True  # nothing will start
    shutil.rmtree(to.built, ignore_errors=True)
    pip = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index")
    options = ("--no-deps", "--no-build-isolation", "--target", to.site)
    defines = [f"--config-settings=cmake.define.{define}" for define in _cuda(to)]
    start = time.monotonic()
    ended = to.run("build.log", LIMITS["build"], *pip, *options, *defines, ROOT)
    took = round(time.monotonic() - start)
    to.record("build", "package", *ended.outcome(), seconds=took, sources=made_of)
    if ended.status != 0:
        print(*ended.text.splitlines()[-60:], sep="\n")
        return False
    to.built.mkdir(parents=True, exist_ok=True)
    known.write_text(made_of)
    return True


def _digest() -> str:
    """Of what a build is made of, by which results are known where git does not know a commit."""
    digest = hashlib.sha256(f"{sys.version} {torch.__version__} {_architecture()}".encode())
    for source in (ROOT / name for name in SOURCES):
        files = [source] if source.is_file() else sorted(source.rglob("*"))
        for path in files:
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _architecture() -> str:
    """The GPU's, as CMake names machine code for it alone."""
    return f"{machine().get('compute_cap', '').replace('.', '')}-real"


def _cuda(to: Slice) -> list[str]:
    if to.device == "cpu":
        return ["FUSEDRL_CUDA=off"]
    return ["FUSEDRL_CUDA=on", f"FUSEDRL_CUDA_ARCHS={_architecture()}"]


def check(to: Slice) -> None:
    """The ops against float64, the tests that need a GPU, and the kernels under the sanitizer."""
    for case in to.asked("check", CHECKS):
        if case == "fusedrl check":
            ended = to.run("check.log", LIMITS["check"], sys.executable, "-m", "fusedrl", "check")
            to.record("check", case, *to.outcome(ended))
        elif case.endswith(".py"):
            _test(to, case)
        else:
            _sanitize(to, case)


def _test(to: Slice, file: str) -> None:
    pytest = (sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider")
    ended = to.run("check.log", LIMITS["check"], *pytest, "-m", "gpu", file)
    tests = Counter(re.findall(r"::.* (PASSED|FAILED|ERROR|SKIPPED)\b", ended.text))
    outcome, why = to.outcome(ended)
    absent = re.search(r"No module named '([\w.]+)'", ended.text)
    if ended.status in (2, 4) and absent is not None:  # torchrl's, where nothing can be installed
        outcome, why = "skipped", f"{absent[1]} is not installed"
    elif ended.status in (0, 5) and not tests["PASSED"]:
        outcome, why = "skipped", "none of its tests runs here"
    to.record("check", file, outcome, why, tests=tests)


def _sanitize(to: Slice, tool: str, job: str | None = None) -> None:
    """Run the main kernels under a tool; what it finds in other kernels is counted, no failure."""
    if shutil.which("compute-sanitizer") is None:
        return to.record("check", tool, "skipped", "compute-sanitizer is not on PATH")
    jobs = list(dict.fromkeys(MAIN_KERNELS.values()))
    # Blocks that torch caches would hide an access past their end.
    ended = to.run(
        *("check.log", LIMITS["check"], "compute-sanitizer", "--tool", tool, "--print-limit", 100),
        *("--error-exitcode", 9, *to.run_jobs("small", *([job] if job else jobs))),
        PYTORCH_NO_CUDA_MEMORY_CACHING="1",
    )
    if "Device not supported" in ended.text:
        return to.record("check", tool, "skipped", "compute-sanitizer does not support this device")
    found = sum(int(n) for n in re.findall(r"SUMMARY: (\d+) (?:error|hazard)", ended.text))
    lines = (line for line in ended.text.splitlines() if line.startswith("==="))
    told = "\n".join(line for line in lines if "Host Frame" not in line)
    kernels = {name.partition("<")[0] for name in model.FACTS["90"]}
    ours = sorted(name for name in kernels if name in told)
    outcome, why = ("failed", f"in {', '.join(ours)}") if ours else to.outcome(ended)
    if ended.status == 9 and not ours:
        outcome, why = "passed", f"{found} findings in kernels of others"
    case = f"{tool}, {job}" if job else tool
    to.record("check", case, outcome, why, found=found, kernels=ours)
    if outcome == "failed" and job is None:  # the first error may end all that follow
        alone = {f"{tool}, {job}": job for job in jobs}
        for case in to.asked("check", alone):
            _sanitize(to, tool, alone[case])


def bench(to: Slice) -> None:
    """The ops at the shapes of the predictions, then with other tiles; prints both side by side."""
    _measure(to, JOBS)
    _sweep(to)
    found = table(to.results.read())
    print(found)
    (to.out / "predictions.md").write_text(found)


def _measure(to: Slice, jobs: Collection[str], variant: str | None = None) -> None:
    """Measure jobs in one process, and in a new one those that are left when it ends."""
    cases = {case_of(job, variant): job for job in jobs}
    waiting = [cases[case] for case in to.asked("bench", cases)]
    options = ["--results", to.results.path]
    if variant is not None:
        options += ["--variant", variant, "--library", _library(to, variant)]
    while waiting:
        known = len(to.results.read())
        command = to.run_jobs("measure", *waiting)
        ended = to.run("bench.log", to.left(), *command, "--seconds", to.left(), *options)
        new = to.results.read()[known:]
        for record in new:
            print(f"gpu: bench: {record['case']}: {record['outcome']}: {record['why']}", flush=True)
        waiting = waiting[len(new) :]
        if any(record["outcome"] == "failed" for record in new):
            to.failed = True
        elif waiting:
            to.record("bench", case_of(waiting.pop(0), variant), *to.outcome(ended))


def _sweep(to: Slice) -> None:
    """Build the linear ops with other sizes of tiles, all variants at once, and measure them."""
    asked = list(to.asked("bench", [f"sweep {variant}" for variant in VARIANTS]))
    if to.device == "cpu" and shutil.which("nvcc") is None:
        for case in asked:
            to.record("bench", case, "skipped", "nvcc is not on PATH")
        return
    if not asked:
        return
    variants = {case.removeprefix("sweep "): case for case in asked}
    builds = "".join(f"({_build_of(to, variant)}) & " for variant in variants)
    ended = to.run("bench.log", LIMITS["variants"], "sh", "-c", f"{builds} wait")
    for variant, case in variants.items():
        if _library(to, variant).is_file():
            to.record("bench", case, "passed")
            _measure(to, SWEPT, variant)
        else:
            outcome, why = to.outcome(ended)
            to.record("bench", case, *(("failed", "no library") if not why else (outcome, why)))


def _library(to: Slice, variant: str) -> Path:
    return to.built / variant / "made/_C_cuda.abi3.so"


def _build_of(to: Slice, variant: str) -> str:
    """What compiles ``_C_cuda`` for the ops that are swept alone, from a copy of the sources."""
    import pybind11

    folder, (name, value) = to.built / variant, variant.split("=")
    shutil.rmtree(folder, ignore_errors=True)
    for part in ("cmake", "csrc"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "CMakeLists.txt", folder)
    for source in folder.glob("csrc/*/cuda.cu"):
        if source.parent.name not in SWEPT:
            source.unlink()
    sizes = folder / "csrc/common/tile_sizes.h"
    text, count = re.subn(rf"(k{name} = int64_t)\(\d+\)", rf"\1({value})", sizes.read_text())
    assert count == 1, f"{sizes} has no size {name}"
    sizes.write_text(text)
    defines = (
        "CMAKE_BUILD_TYPE=Release",
        f"FUSEDRL_TORCH_DIR={Path(torch.__file__).parent}",
        f"Python_EXECUTABLE={sys.executable}",
        f"pybind11_DIR={pybind11.get_cmake_dir()}",
        *_cuda(to),
    )
    made = str(folder / "made")
    configure = ("cmake", "-S", str(folder), "-B", made, *(f"-D{define}" for define in defines))
    compile_it = ("cmake", "--build", made, "--target", "_C_cuda", "--parallel", "4")
    return f"{shlex.join(configure)} && {shlex.join(compile_it)}"


def profile(to: Slice) -> None:
    """What ncu counts of the main kernels; it leaves the clocks as they are."""
    ncu = ("ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none")
    refused = "ncu is not on PATH" if shutil.which("ncu") is None else ""
    mode = "profile" if to.device == "cuda" else "tiny"
    for kernel in to.asked("profile", MAIN_KERNELS):
        if refused:
            to.record("profile", kernel, "skipped", refused)
            continue
        chosen = ("--metrics", ",".join(METRICS), "-k", f"regex:{kernel}", "-c", 1)
        command = (*ncu, *chosen, *to.run_jobs(mode, MAIN_KERNELS[kernel]))
        ended = to.run("profile.log", LIMITS["profile"], *command)
        said = re.search(r"ERR_NVGPUCTRPERM|LibraryNotLoaded|Failed to initialize", ended.text)
        if said is not None:
            refused = f"ncu may not read the counters here: {said[0]}"
            to.record("profile", kernel, "skipped", refused)
            continue
        counted, (outcome, why) = _metrics(ended.text), to.outcome(ended)
        if outcome == "passed" and not counted:
            outcome, why = "failed", "ncu counted no kernel"
        to.record("profile", kernel, outcome, why, counted=counted)


def _metrics(text: str) -> dict[str, str]:
    """The metrics of the first kernel, with their units behind their names."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    found = zip(*rows[:3], strict=False) if len(rows) > 2 else ()
    return {f"{name} {unit}".strip(): value for name, unit, value in found if name in METRICS}


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: what was measured beside what was predicted, of cases and of their kernels."""
    heading = (
        *("case", "rows x hidden x classes", "kernel", "measured", "predicted", "ratio"),
        *("predicted with the rates here", "ratio", "copy", "product", "SM clock"),
    )
    lines = [heading, ("---",) * len(heading)]
    for record in (record for record in records if "ms" in record):
        stated, here = (record.get(name, {}) for name in ("predicted_ms", "predicted_here_ms"))
        rows = {"all": (record["ms"], sum(stated.values()), sum(here.values()))}
        for name, measured in record["kernel_ms"].items():
            rows[name] = (measured, stated.get(name, 0.0), here.get(name, 0.0))
        for kernel, (measured, *predictions) in rows.items():
            cells = [f"{measured:.3g} ms"]
            for one in predictions:
                cells += [f"{one:.3g} ms", f"{measured / one:.2f}"] if one else ["-", "-"]
            beside = (
                f"{record['copy_gb_s']:.0f} GB/s",
                f"{record['product_tflop_s']:.3g} TFLOP/s",
                f"{record['machine'].get('clocks.sm', '?')} MHz",
            )
            shape = " x ".join(map(str, record["shape"]))
            lines.append((record["case"], shape, kernel, *cells, *beside))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


PARTS = {"build": lambda to: None, "check": check, "bench": bench, "profile": profile}


def main() -> int:
    """Run the parts that are asked for, one after the other, within the seconds of one slice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--only", action="append", help="part of the names of cases (repeatable)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="default: %(default)s")
    parser.add_argument("--build", type=Path, default=ROOT / "build/gpu", help="of the package")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, on tiny shapes")
    args = parser.parse_args()
    parts = args.part.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--part: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}")
    if args.rehearse and (ROOT / "benchmarks/results") in args.out.resolve().parents:
        parser.error("--out: expected a folder outside of benchmarks/results in a rehearsal")
    if not args.rehearse and not (torch.cuda.is_available() and machine()):
        parser.error("expected a GPU of torch's and nvidia-smi's; --rehearse does without")
    if not args.rehearse and find_spec("fusedrl") is not None:
        parser.error(
            "expected a Python without fusedrl, which may hide what is built; name another"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C, so that children end
    args.out.mkdir(parents=True, exist_ok=True)
    to = Slice(args)
    here = machine() | {"torch": torch.__version__, "cuda": torch.version.cuda}
    to.record("machine", here.get("name") or "no GPU", "passed", machine=here)
    if build(to):
        for part in parts:
            PARTS[part](to)
    print(f"gpu: results in {to.out}, after {args.seconds - to.left():.0f} s")
    return int(to.failed)


if __name__ == "__main__":
    sys.exit(main())
