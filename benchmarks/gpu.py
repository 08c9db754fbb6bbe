"""What a machine with a GPU is needed for, in one go: ``make gpu``.

A step that fails leaves the others to run; the exit code is 1 if any failed. Neither network nor
environment is needed: the package is built into build/gpu, by and for the interpreter running this.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "gpu"
TOTAL = 860  # seconds for all steps together; the benchmarks get what the others leave
LIMITS = {"build": 300.0, "tests": 220.0, "memcheck": 80.0, "racecheck": 80.0, "bench": TOTAL}
SAMPLE = 16  # GPU tests under compute-sanitizer, spread over all of them
# Too slow under compute-sanitizer, or wrong on purpose.
UNSAMPLED = re.compile("two_to_the_31|assert|50257|151936|16391|cuda_graph")


class Skip(Exception):
    """A step that cannot run on this machine, and why."""


def main() -> int:
    """Run the steps in turn, then say how each went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step", choices=LIMITS, action="append", help="only this (repeatable)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a dry run")
    parser.add_argument("--seconds", default="0.3", help="of a contender in the benchmarks")
    parser.add_argument("--total", type=float, default=TOTAL, help="seconds for all steps")
    parser.add_argument("--op", action="append", help="only this op's benchmarks (repeatable)")
    parser.add_argument("--commit", default="", help="to record where git does not know it")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<name of the GPU>")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu: expected a CUDA device, torch finds none; --device cpu is a dry run")
        return 2
    args.out = (args.out or ROOT / "benchmarks" / "results" / _slug(args.device)).resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + args.total
    outcomes = {}
    for name in args.step or LIMITS:
        limit = max(min(LIMITS[name], deadline - time.monotonic()), 1)
        print(f"gpu: {name}, at most {limit:.0f} s", flush=True)
        start = time.monotonic()
        try:
            status = STEPS[name](args, limit)
            outcomes[name] = "passed" if status == 0 else f"FAILED with exit status {status}"
        except Skip as why:
            outcomes[name] = f"skipped: {why}"
        except subprocess.TimeoutExpired:
            outcomes[name] = f"FAILED: not done after {limit:.0f} s"
        outcomes[name] += f" ({time.monotonic() - start:.0f} s)"
    print(*(f"gpu: {name}: {outcome}" for name, outcome in outcomes.items()), sep="\n")
    print(f"gpu: results in {args.out}")
    return int(any("FAILED" in outcome for outcome in outcomes.values()))


def _slug(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")


def _run(log: Path, limit: float, *command: object, **environment: str) -> int:
    """Run a command from the checkout on the package in build/gpu; its output goes to ``log`` too.

    It is killed, with the processes that it started, when the time is up.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=_environment() | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            raise
        finally:
            print(*log.read_text(errors="replace").splitlines()[-60:], sep="\n", flush=True)


def _build(args: argparse.Namespace, limit: float) -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index"]
    cuda = "on" if args.device == "cuda" else "off"
    define = f"--config-settings=cmake.define.FUSEDRL_CUDA={cuda}"
    options = ["--no-deps", "--no-build-isolation", "--target", BUILD, define]
    return _run(args.out / "build.log", limit, *pip, *options, ROOT)


def _tests(args: argparse.Namespace, limit: float) -> int:
    folders = ("tests/ops", "tests/models", "tests/channel", "tests/engines")
    return _run(args.out / "pytest.log", limit, *_pytest(), "-m", "gpu", *folders)


def _sanitizer(tool: str) -> Callable[[argparse.Namespace, float], int]:
    def step(args: argparse.Namespace, limit: float) -> int:
        if args.device != "cuda":
            raise Skip("it checks CUDA kernels, and this is a dry run on the CPU")
        if shutil.which("compute-sanitizer") is None:
            raise Skip("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
        log = args.out / f"{tool}.log"
        # 9 is none of pytest's own: the tool found something. Blocks that torch caches would hide
        # an access past their end.
        sanitizer = ["compute-sanitizer", "--tool", tool, "--error-exitcode", 9]
        uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        status = _run(log, limit, *sanitizer, *_pytest(), *_sample(), **uncached)
        if "Device not supported" in log.read_text(errors="replace"):
            raise Skip("compute-sanitizer does not support this device here")
        return status

    return step


def _pytest() -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def _sample() -> list[str]:
    """Some GPU tests of every kind."""
    command = [*_pytest(), "-m", "gpu", "tests/ops", "--collect-only"]
    listing = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, check=False
    ).stdout
    found = [line for line in listing.splitlines() if "::" in line and " " not in line]
    fit = [test for test in found if not UNSAMPLED.search(test)]
    if not fit:
        raise Skip("there are no GPU tests in tests/ops")
    count = min(SAMPLE, len(fit))
    return [fit[i * len(fit) // count] for i in range(count)]


def _environment() -> dict[str, str]:
    """This process's, with the package in build/gpu before what PYTHONPATH already names."""
    path = os.pathsep.join(filter(None, [str(BUILD), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _bench(args: argparse.Namespace, limit: float) -> int:
    command = [sys.executable, "-m", "fusedrl", "bench", "--peers", "--device", args.device]
    command += ["--seconds", args.seconds, "--out", args.out, "--commit", args.commit]
    # It starts no case after this, and has the rest to end the last one and to draw its plot.
    command += ["--limit", 0.8 * limit]
    command += ["--quick"] if args.device == "cpu" else []
    ops = [part for op in args.op or [] for part in ("--op", op)]
    return _run(args.out / "bench.log", limit, *command, *ops)


STEPS = {
    "build": _build,
    "tests": _tests,
    "memcheck": _sanitizer("memcheck"),
    "racecheck": _sanitizer("racecheck"),
    "bench": _bench,
}

if __name__ == "__main__":
    sys.exit(main())
