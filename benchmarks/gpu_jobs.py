"""The ops that ``gpu.py`` runs on a GPU, each in a process of its own.

``measure JOB...`` times jobs at the shapes of the predictions and appends a line of results after
each; ``small`` and ``profile`` run them once, for tools that watch the kernels; ``publish`` times
the channel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_model as model
import torch
import torch.nn.functional as F
from torch import Tensor

Run = Callable[..., Any]
Runs = dict[str, Run]
OURS, TORCH, PRODUCTS = "fusedrl", "torch", "bare products"
NOTHING = 77  # exit status: there is nothing here to measure
SECONDS = 1.0  # of repetitions of a contender
DIFFERS = 0.05  # at most, of the norm of the gradient: bfloat16 on both sides
TINY = model.Case(16, 32, 300)
ONCE = {
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
    values = [value.strip() for value in done.stdout.partition("\n")[0].split(",")]
    return dict(zip(QUERY, values, strict=True)) if len(values) == len(QUERY) else {}


def append(path: Path, record: dict[str, Any]) -> None:
    """A line of results, whole and on disk whenever its writer is killed."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(record) + "\n").encode())
        os.fsync(file.fileno())


class Job(NamedTuple):
    """An op with its gradients, beside other ways to them.

    Args:
        shape: of the predictions.
        prepare: makes the inputs on a device, and what runs on them: ours first.
        steps: what the model says that ours runs.
    """

    shape: model.Case
    prepare: Callable[[str, model.Case], Runs]
    steps: Callable[[model.Case], list[model.Step]]


def _op(name: str) -> Run:
    return getattr(importlib.import_module("fusedrl"), name)


def _bench(name: str) -> Any:
    return importlib.import_module(f"fusedrl.benchmarks.{name}")


def _differentiated(inputs: Collection[Tensor], calls: Runs) -> Runs:
    leaves = [x.detach().requires_grad_() for x in inputs]

    def run(call: Run) -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*leaves).sum(), leaves)

    return {name: partial(run, call) for name, call in calls.items()}


def _log_probs(device: str, shape: model.Case, impl: str = "auto") -> Runs:
    op, of = _op("linear_token_log_probs"), _bench("bench_linear_token_log_probs")
    job = of.make_job(device, (1, shape.rows), shape.width, shape.classes, torch.bfloat16, 1.0)
    impl = impl if device == "cuda" else "auto"
    paths = {TORCH: of.plain_torch, **_bench("peers").LINEAR_LOG_PROB_SUM}
    paths = {name: of.on_kept_rows(path) for name, path in paths.items()}
    paths = {OURS: lambda job: op(*job[:3], impl=impl).log_probs, **paths}
    runs: Runs = {name: partial(of.gradients, path, job) for name, path in paths.items()}
    return runs | {PRODUCTS: partial(of.bare_products(job)[1], job)}


def _frozen_head(device: str, shape: model.Case) -> Runs:
    op, of = _op("linear_token_log_probs"), _bench("bench_linear_token_log_probs")
    job = of.make_job(device, (1, shape.rows), shape.width, shape.classes, torch.bfloat16, 1.0)
    logits, grad = job.hidden.new_empty(shape.rows, shape.classes), job.hidden.new_empty(shape[:2])

    def products() -> None:
        torch.mm(job.hidden[0], job.weight.T, out=logits)
        torch.mm(logits, job.weight, out=grad)

    calls = {
        OURS: lambda hidden: op(hidden, job.weight, job.tokens).log_probs,
        TORCH: lambda hidden: of.on_kept_rows(of.plain_torch)(job._replace(hidden=hidden)),
    }
    return _differentiated([job.hidden], calls) | {PRODUCTS: products}


def _linear_kl(device: str, shape: model.Case) -> Runs:
    op, of, peers = _op("linear_exact_kl"), _bench("bench_linear_exact_kl"), _bench("peers")
    hidden, weight, *ref = of.make_heads(device, shape, torch.bfloat16)
    logits = hidden.new_empty(shape.rows, shape.classes)
    grads = torch.empty_like(hidden), torch.empty_like(weight)

    def products() -> None:
        for states, head in 2 * [(hidden, weight), ref]:
            torch.mm(states, head.T, out=logits)
        torch.mm(logits, weight, out=grads[0])
        torch.mm(logits.T, hidden, out=grads[1])

    calls = {
        OURS: lambda *policy: op(*policy, *ref).kl,
        TORCH: lambda *policy: of.both_logits((*policy, *ref), "reverse"),
        peers.LIGER: lambda *policy: peers.liger_linear_mean_kl(*policy, *ref, "reverse"),
    }
    return _differentiated([hidden, weight], calls) | {PRODUCTS: products}


def _of_logits(device: str, shape: model.Case, entropy: bool = False) -> Runs:
    op = _op("token_log_probs")
    logits = torch.randn(shape.rows, shape.classes, device=device, dtype=torch.bfloat16)
    tokens = torch.randint(0, shape.classes, (shape.rows,), device=device)
    if entropy:
        return _differentiated([logits], {OURS: lambda x: sum(op(x, tokens, entropy=True))})
    calls = {
        OURS: lambda x: op(x, tokens).log_probs,
        TORCH: lambda x: -F.cross_entropy(x.float(), tokens, reduction="none"),
    }
    return _differentiated([logits], calls)


def _of_pairs(device: str, shape: model.Case, direction: str = "reverse") -> Runs:
    op, of, peers = _op("exact_kl"), _bench("bench_exact_kl"), _bench("peers")
    calls = {
        OURS: lambda *pair: op(*pair, direction=direction).kl,
        TORCH: lambda *pair: of.plain_torch(pair, direction),
        peers.LIGER: lambda *pair: peers.liger_mean_kl(*pair, direction),
    }
    return _differentiated(of.make_pair(device, shape[::2], torch.bfloat16), calls)


def _rows(*kernels: str) -> Callable[[model.Case], list[model.Step]]:
    return lambda case: [model.Step(name, case.rows, case.classes, 0, 0) for name in kernels]


PAIRS = model.LARGE._replace(rows=4096)
HEADLINES = {  # each beside plain torch and the products alone, the most valuable first
    "linear_token_log_probs": Job(model.LARGE, _log_probs, model.log_probs),
    "linear_token_log_probs, head frozen": Job(model.LARGE, _frozen_head, model.frozen_head),
    "linear_exact_kl": Job(model.LARGE, _linear_kl, model.exact_kl),
    "token_log_probs": Job(model.LARGE, _of_logits, _rows("forward_rows", "backward_rows")),
    "exact_kl": Job(PAIRS, _of_pairs, _rows("forward_pairs", "backward_pairs")),
}
OTHERS = {
    "linear_token_log_probs, few rows": Job(model.SMALL, _log_probs, model.log_probs),
    "token_log_probs, entropy": Job(
        model.LARGE,
        partial(_of_logits, entropy=True),
        _rows("forward_rows, entropy", "backward_rows"),
    ),
    "exact_kl, mixture": Job(
        PAIRS,
        partial(_of_pairs, direction="jensen_shannon"),
        _rows("forward_pairs, mixture", "backward_pairs, mixture"),
    ),
    "linear_token_log_probs, triton": Job(
        model.LARGE, partial(_log_probs, impl="triton"), lambda case: []
    ),
}
JOBS = HEADLINES | OTHERS


def others(beside: str, device: str) -> set[str]:
    """What runs of a job are timed beside ours: of nothing, torch or peers."""
    peers = _bench("peers")
    usable = set(peers.MODULES) - peers.absent(device, third_party=True).keys()
    named = {
        "nothing": set(),
        "torch": {TORCH, PRODUCTS, *({peers.LINEAR_CE} & usable)},
        "peers": set(peers.THIRD_PARTY) & usable,
    }
    return named[beside]


def measure(name: str, device: str, tiny: bool, beside: set[str]) -> dict[str, Any]:
    """Times and memory of a job and of what it is compared with, and times of its kernels."""
    harness, job = _bench("harness"), JOBS[name]
    shape = TINY if tiny else job.shape
    runs = job.prepare(device, shape)
    runs = {way: run for way, run in runs.items() if way.split(",")[0] in {OURS, *beside}}
    case = harness.Case(
        op=name,
        setting=" x ".join(map(str, shape)),
        contenders={way: lambda _, run=run: run() for way, run in runs.items()},
        make_input=lambda: None,
    )
    rows = [asdict(row) for row in harness.measure(case, SECONDS, device)]
    rows = [{key: x for key, x in row.items() if x is not None} for row in rows]
    here, failed = machine(), "failed" in rows[0]
    runs = {row["contender"]: runs[row["contender"]] for row in rows if "failed" not in row}
    return {
        "shape": shape,
        "rows": rows,
        "differs": None if failed else _difference(runs),
        "kernels": {} if failed else _kernels(runs[OURS], device, job.steps(shape), here),
        "machine": here,
        **_ceilings(harness, device, tiny),
    }


def _difference(runs: Runs) -> float | None:
    """Of our first gradient from plain torch's, relative to its norm; NaN where ours is one."""
    mine = runs[OURS]()[0].float()
    if TORCH not in runs:
        return None if bool(mine.isfinite().all()) else float("nan")
    other = runs[TORCH]()[0].float()
    return ((mine - other).norm() / other.norm()).item()


def _ceilings(harness: Any, device: str, tiny: bool) -> dict[str, float]:
    """What a large copy moves, and a large product of bfloat16 computes, in a second."""
    if tiny:
        return {}
    clock, n = harness.Clock(device, host_bound=False), 8192
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = statistics.median([clock(lambda _: a @ b, None) for _ in range(10)][3:])
    copy = harness.copy_bandwidth(device)
    return {"copy_gb_s": copy / 1e9, "product_tflop_s": 2 * n**3 / product / 1e12}


def _kernels(
    run: Run, device: str, steps: list[model.Step], here: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Milliseconds of each row kernel of ``steps``, its share of the bandwidth, and the model's."""
    of_rows = {x.name: x for x in steps if x.name in model.KERNELS}
    gpu = next((x for x in model.GPUS if x.name in here.get("name", "")), None)
    names = {name.split(",")[0]: name for name in of_rows}
    found = {}
    for base, milliseconds in _kernel_times(run, names if device == "cuda" else ()).items():
        found[names[base]] = {"ms": milliseconds}
        if gpu is not None:
            elements = sum(x.rows * x.columns for x in steps if x.name == names[base])
            size = model.KERNELS[names[base]]
            found[names[base]] |= {
                "share": elements * size / (milliseconds / 1e3) / gpu.bandwidth,
                "predicted_ms": 1e3 * elements * model.seconds(names[base], gpu),
            }
    return found


def _kernel_times(run: Run, names: Collection[str]) -> dict[str, float]:
    """Milliseconds of each kernel that is named."""
    times: dict[str, float] = {}
    if not names:
        return times
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    for event in profiled.events() or []:
        base = re.search(r"(\w+)[<(]", event.name)
        if event.device_type.name == "CUDA" and base is not None and base[1] in names:
            times[base[1]] = times.get(base[1], 0.0) + event.time_range.elapsed_us() / 1e3
    return times


def publish(device: str, tiny: bool = False) -> dict[str, Any]:
    """Milliseconds that a version of 1 GB takes, and until another process has computed with it."""
    channels, workers = importlib.import_module("fusedrl.channel"), _bench("channel_workers")
    numbers = 625 if tiny else 625_000
    weights = {str(n): torch.randn(numbers, device=device) for n in range(400)}
    source = torch.cat(list(weights.values()))
    target = torch.empty_like(source)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {"copy": [], "publish": [], "computed": []}
    times["release"] = []  # until the slot of a lease is free, on a stream without work
    with channels.WeightChannel.create(weights) as channel, channel.handle.open() as here:
        channel.publish(weights)
        reader = workers.Worker(_read, channel.handle)
        reader.answer()
        for _ in range(23):
            for name, run in ("copy", lambda: target.copy_(source)), ("publish", channel.publish):
                wait()
                start = time.perf_counter()
                run()
                wait()
                times[name].append(time.perf_counter() - start)
            version = reader.ask(channel.version, lambda: None)
            times["computed"].append(time.perf_counter() - start)
            if version != channel.version:
                raise ValueError(f"expected version {channel.version}, got {version}")
            lease = here.lease()
            start = time.perf_counter()
            lease.release()
            wait()
            times["release"].append(time.perf_counter() - start)
        reader.close()
    medians = {f"{name}_ms": 1e3 * statistics.median(some[3:]) for name, some in times.items()}
    return {"bytes": source.nbytes, **medians}


def _read(handle: Any, pipe: Any) -> None:
    """Whenever it is asked, compute with all of the newest weights, and say which they were."""
    with handle.open() as reader:
        pipe.send("open")
        while pipe.recv():
            with reader.lease() as lease:
                torch.stack([x.sum() for x in lease.weights.values(True, True)]).sum().item()
                pipe.send(lease.version)


def main() -> int:
    """Run what ``gpu.py`` asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("measure", "publish", *ONCE))
    parser.add_argument("jobs", nargs="*", metavar="JOB")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="shapes that say nothing of speed")
    parser.add_argument("--beside", default="nothing", choices=("nothing", "torch", "peers"))
    parser.add_argument("--results", type=Path, default=Path("gpu.jsonl"))
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.mode == "publish":
        figures = publish(args.device, args.tiny)
        append(args.results, {"job": "publish", **figures})
        print(figures)
        return 0
    if args.mode == "measure":
        return _measure_each(args)
    for shape in [TINY] if args.tiny else ONCE[args.mode]:
        for name in args.jobs:
            JOBS[name].prepare(args.device, shape)[OURS]()
    return 0


def _measure_each(args: argparse.Namespace) -> int:
    beside = others(args.beside, args.device)
    if args.beside == "peers" and not beside:
        print("no peer is usable here")
        return NOTHING
    said, status = [], 0
    for name in args.jobs:
        figures = measure(name, args.device, args.tiny, beside)
        known = {"job": name, "beside": args.beside, "tiny": args.tiny}
        append(args.results, known | figures)
        for row in figures["rows"]:
            figure = row.get("failed") or f"{row['median_ms']:.3g} ms"
            said.append(f"{name}: {row['contender']} {figure}")
        ours, differs = figures["rows"][0], figures["differs"]
        if "failed" in ours or (differs is not None and not differs <= DIFFERS):
            said.append(f"{name} differs by {differs}")
            status = 1
        print(*said, sep=", ", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
