"""The ops that ``gpu.py`` runs on a GPU, and what the model predicts of each.

``python gpu_jobs.py measure JOB...`` times jobs at the shapes of the predictions and appends a line
of results after each; another mode runs them once at shapes of its own, for tools that watch the
kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_model as model
import torch
from torch import Tensor

Run = Callable[[], Any]
REST = "products and the rest"
NO_TIME = "no time is left"
SECONDS, MOST_SECONDS = 1.0, 60  # of repetitions, and of a job with all that it needs
ONCE = {
    "tiny": [model.Case(16, 32, 300)],
    "small": [model.Case(304, 64, 1031), model.Case(16, 64, 40009)],  # several blocks a row, too
    "profile": [model.Case(1024, 1024, 151936)],
}
QUERY = (
    *("name", "compute_cap", "driver_version"),
    *("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"),
)


def machine() -> dict[str, str]:
    """What nvidia-smi says of the first GPU now; nothing where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(",")
    return dict(zip(QUERY, map(str.strip, values), strict=True))


class Results:
    """The file of results: a line for each case, whole whenever its writer is killed."""

    def __init__(self, path: Path, rehearsal: bool):
        self.path, self.rehearsal = path, rehearsal

    def add(self, part: str, case: str, outcome: str, why: str = "", **figures: Any) -> None:
        """Print how a case ended, and append it."""
        print(f"gpu: {part}: {case}: {outcome}{why and f': {why}'}", flush=True)
        known = {"part": part, "case": case, "outcome": outcome, "why": why}
        line = json.dumps(known | {"rehearsal": self.rehearsal} | figures) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All that were added, by earlier commands too."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]


class Job(NamedTuple):
    """An op and its gradients.

    Args:
        shape: of the predictions.
        prepare: makes the inputs on a device, and what runs the op on them.
        steps: what the model says that the op runs.
    """

    shape: model.Case
    prepare: Callable[[str, model.Case], Run]
    steps: Callable[[model.Case], list[model.Step]]


def _op(name: str) -> Callable[..., Any]:
    return getattr(importlib.import_module("fusedrl"), name)


def _bench(op: str) -> Any:
    return importlib.import_module(f"fusedrl.benchmarks.bench_{op}")


def _differentiated(call: Callable[..., Any], inputs: Sequence[Tensor]) -> Run:
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(call(*leaves).sum(), leaves)


def _policy_loss(device: str, shape: model.Case) -> Run:
    of, tokens = _bench("linear_policy_loss"), (8, shape.rows // 8)
    job = of.make_job(device, tokens, tokens[1], shape.width, shape.classes, torch.bfloat16)
    job = job._replace(mask=None)  # which keeps all of them
    return lambda: of.gradients(of.ours, job)


def _log_probs(device: str, shape: model.Case, impl: str = "auto") -> Run:
    op, of = _op("linear_token_log_probs"), _bench("linear_token_log_probs")
    job = of.make_job(device, (1, shape.rows), shape.width, shape.classes, torch.bfloat16, 1.0)
    return _differentiated(lambda *head: op(*head, job.tokens, impl=impl), job[:2])


def _by_triton(device: str, shape: model.Case) -> Run:
    return _log_probs(device, shape, "triton" if device == "cuda" else "auto")


def _linear_kl(device: str, shape: model.Case) -> Run:
    op = _op("linear_exact_kl")
    heads = _bench("linear_exact_kl").make_heads(device, shape, torch.bfloat16)
    return _differentiated(lambda *policy: op(*policy, *heads[2:]), heads[:2])


def _linear_top_k(device: str, shape: model.Case) -> Run:
    op, of = _op("linear_top_k_kl"), _bench("linear_top_k_kl")
    job = of.make_job(device, shape, torch.bfloat16)
    return _differentiated(lambda *head: op(*head, *job[2:]), job[:2])


def _of_logits(device: str, shape: model.Case, entropy: bool = False) -> Run:
    op = _op("token_log_probs")
    logits = torch.randn(shape.rows, shape.classes, device=device, dtype=torch.bfloat16)
    tokens = torch.randint(0, shape.classes, (shape.rows,), device=device)
    if entropy:
        return _differentiated(lambda x: sum(op(x, tokens, entropy=True)), [logits])
    return _differentiated(lambda x: op(x, tokens), [logits])


def _with_entropy(device: str, shape: model.Case) -> Run:
    return _of_logits(device, shape, entropy=True)


def _of_pairs(device: str, shape: model.Case, direction: str = "reverse") -> Run:
    op, rows = _op("exact_kl"), (shape.rows, shape.classes)
    pair = _bench("exact_kl").make_pair(device, rows, torch.bfloat16)
    return _differentiated(lambda *pair: op(*pair, direction=direction), pair)


def _mixture(device: str, shape: model.Case) -> Run:
    return _of_pairs(device, shape, "jensen_shannon")


def _top_k(device: str, shape: model.Case) -> Run:
    op, rows = _op("top_k_kl"), (shape.rows, shape.classes)
    logits, *teacher = _bench("top_k_kl").make_job(device, rows, torch.bfloat16)
    return _differentiated(lambda x: op(x, *teacher), [logits])


def _rows(*kernels: str) -> Callable[[model.Case], list[model.Step]]:
    return lambda case: [model.Step(name, case.rows, case.classes, 0, 0) for name in kernels]


def _top_k_steps(case: model.Case) -> list[model.Step]:
    tiles = model.tiles_of(case.rows, case.classes)
    return [
        *model.steps(tiles, case.width, "split_tile", False),
        *model.steps(tiles, case.width, "differentiate_top_k_tile", True),
    ]


# The most valuable first.
PAIRS = model.LARGE._replace(rows=4096)
JOBS = {
    "linear_policy_loss": Job(model.LARGE, _policy_loss, model.policy_loss),
    "linear_token_log_probs": Job(model.LARGE, _log_probs, model.log_probs),
    "token_log_probs": Job(model.LARGE, _of_logits, _rows("forward_rows", "backward_rows")),
    "linear_exact_kl": Job(model.LARGE, _linear_kl, model.exact_kl),
    "exact_kl": Job(PAIRS, _of_pairs, _rows("forward_pairs", "backward_pairs")),
    "linear_token_log_probs, few rows": Job(model.SMALL, _log_probs, model.log_probs),
    "token_log_probs, entropy": Job(
        model.LARGE, _with_entropy, _rows("forward_rows, entropy", "backward_rows")
    ),
    "exact_kl, mixture": Job(
        PAIRS, _mixture, _rows("forward_pairs, mixture", "backward_pairs, mixture")
    ),
    "top_k_kl": Job(PAIRS, _top_k, _rows("split_rows", "differentiate_rows")),
    "linear_top_k_kl": Job(PAIRS, _linear_top_k, _top_k_steps),
    "linear_token_log_probs, triton": Job(model.LARGE, _by_triton, model.log_probs),
}


def predicted(steps: list[model.Step], gpu: model.Gpu) -> dict[str, float]:
    """Milliseconds by kernel; products, their sums and roundings together."""
    times: dict[str, float] = {}
    for step in steps:
        name = step.name.split(",")[0] if step.name in model.KERNELS else REST
        times[name] = times.get(name, 0.0) + 1e3 * step.seconds(gpu)
    return times


def measure(name: str, device: str) -> dict[str, Any]:
    """Median times of a job, of its kernels and of what bounds them, beside what is predicted.

    ``predicted_ms`` is by what NVIDIA states of the GPU, and ``predicted_here_ms`` by its clock and
    by the copy and the product that are timed here.
    """
    clock = importlib.import_module("fusedrl.benchmarks.harness").Clock(device, host_bound=False)
    ceilings = _ceilings(clock, device)
    shape = JOBS[name].shape if device == "cuda" else ONCE["tiny"][0]
    run, steps = JOBS[name].prepare(device, shape), JOBS[name].steps(shape)
    if not all(bool(x.isfinite().all()) for x in run()):
        raise ValueError("expected finite gradients, got others")
    peak = _peak_mib(run, device)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 50 and sum(times) < 1e3 * SECONDS):
        times.append(1e3 * clock(lambda _: run(), None))
    here = machine()
    found = {name: predicted(steps, gpu) for name, gpu in _gpus(here, ceilings).items()}
    kernels = _kernel_times(run, device, found.get("predicted_ms", {}))
    return {
        "shape": shape,
        "ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "repetitions": len(times),
        "kernel_ms": kernels,
        "peak_extra_mib": peak,
        "machine": here,
        **ceilings,
        **found,
    }


def _gpus(here: dict[str, str], ceilings: dict[str, float]) -> dict[str, model.Gpu]:
    """This GPU as NVIDIA states it, and with the rates and the clock that it has here."""
    known = (gpu for gpu in (*model.GPUS, model.H200) if gpu.name in here.get("name", ""))
    if (stated := next(known, None)) is None:
        return {}
    megahertz = re.fullmatch(r"\d+", here["clocks.sm"])
    actual = stated._replace(
        clock=stated.clock if megahertz is None else 1e6 * int(megahertz[0]),
        bandwidth=1e9 * ceilings["copy_gb_s"] / stated.REACHED_BANDWIDTH,
        tensor_rate=1e12 * ceilings["product_tflop_s"] / stated.REACHED_PRODUCTS,
    )
    return {"predicted_ms": stated, "predicted_here_ms": actual}


def _ceilings(clock: Any, device: str) -> dict[str, float]:
    """What a large copy moves, and a large product of bfloat16 computes, in a second."""
    copy = importlib.import_module("fusedrl.benchmarks.harness").copy_bandwidth(device)
    n = 8192 if device == "cuda" else 256
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median([clock(lambda _: a @ b, None) for _ in range(10)][3:])
    return {"copy_gb_s": copy / 1e9, "product_tflop_s": 2 * n**3 / product / 1e12}


def _peak_mib(run: Run, device: str) -> float | None:
    if device == "cpu":
        return None
    return importlib.import_module("fusedrl.benchmarks.harness").peak_extra_mib(
        lambda _: run(), None, device
    )


def _kernel_times(run: Run, device: str, names: Collection[str]) -> dict[str, float]:
    """Milliseconds of each kernel that is named, and of all others together."""
    times: dict[str, float] = {}
    if device == "cpu":
        return times
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    for event in profiled.events() or []:
        if event.device_type.name == "CUDA":
            base = re.search(r"(\w+)[<(]", event.name)
            name = base[1] if base is not None and base[1] in names else REST
            times[name] = times.get(name, 0.0) + event.time_range.elapsed_us() / 1e3
    return times


def use(variant: str, library: Path) -> None:
    """Take another library of CUDA ops, and tell the model about its tiles."""
    from fusedrl import native

    find, (size, value) = native.find, variant.split("=")
    native.find = lambda name: library if name == "_C_cuda" else find(name)
    model.SIZES[size] = int(value) << 20


def main() -> int:
    """Run jobs: this process is a child of ``gpu.py``, and ends with it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("measure", *ONCE))
    parser.add_argument("jobs", nargs="+", choices=JOBS, metavar="JOB")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no job after")
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"))
    parser.add_argument("--variant", help="sizes of tiles, as in gpu.py")
    parser.add_argument("--library", type=Path, help="that has them")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    torch.manual_seed(0)
    if args.variant is not None:
        use(args.variant, args.library)
    if args.mode != "measure":
        for shape in ONCE[args.mode]:
            for name in args.jobs:
                JOBS[name].prepare(args.device, shape)()
        return 0
    return _measure_each(args, Results(args.results, args.device == "cpu"))


def _measure_each(args: argparse.Namespace, results: Results) -> int:
    end = time.monotonic() + args.seconds
    for name in args.jobs:
        case = case_of(name, args.variant)
        if time.monotonic() > end:
            results.add("bench", case, "skipped", NO_TIME)
            continue
        signal.alarm(MOST_SECONDS)  # which ends this process, in a kernel too
        try:
            figures = measure(name, args.device)
        except Exception as error:
            said = (str(error).strip() or "no message").splitlines()[0][:300]
            results.add("bench", case, "failed", f"{type(error).__name__}: {said}")
            return 1  # the device may be of no use to this process any more
        results.add("bench", case, "passed", f"{figures['ms']:.3g} ms", **figures)
    return 0


def case_of(job: str, variant: str | None) -> str:
    """The name of a job in the results."""
    return job if variant is None else f"{job}, {variant}"


if __name__ == "__main__":
    sys.exit(main())
