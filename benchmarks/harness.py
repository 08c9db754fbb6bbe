"""Measure contenders side by side: interleaved repetitions, medians, ratios within one run."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

OURS = "fusedrl"  # what the names of our own contenders begin with
COPY = "copy"  # the ceiling of a job that memory bounds
COPY_DEFINITION = (
    "random bytes read and written a second by torch's copy_ between two large buffers of the "
    "device (all threads on a CPU), the fastest of 10; a job that mostly reads can exceed it"
)

Run = Callable[[Any], Any]


@dataclass
class Measured:
    """What a run returns that other processes make, and that they measure themselves."""

    seconds: float
    peak_extra_mib: float | None


@dataclass
class Case:
    """One setting and everyone who runs it; ratios are those of the first of our contenders.

    ``goals`` maps a rival to the least speed-up of ours; one below 1 grants ours ``1 / goal`` times
    the rival's time. ``work`` is what the job must at least do: bytes to read and write where the
    ceiling is ``COPY``, else floating-point operations, and the ceiling is the entry of
    ``timed_only`` that runs the job's bare matrix products.
    """

    op: str
    setting: str
    contenders: dict[str, Run]
    make_input: Callable[[], Any]  # called before every repetition, outside the clock
    timed_only: dict[str, Run] = field(default_factory=dict)  # no answer to compare
    truth: Run | None = None  # float64 answer to the same input
    answer: Callable[[Any], torch.Tensor] = lambda out: out  # the tensor to compare
    goals: dict[str, float] = field(default_factory=dict)
    work: float | None = None
    ceiling: str = COPY
    least_fraction: float | None = None  # goal: ours at least this share of the ceiling
    most_extra_mib: float | None = None  # goal: ours at most this memory beside its input
    host_bound: bool = False  # Python is part of the job: the wall clock, on a GPU too
    threads: int | None = None  # of torch on the CPU; ``None`` leaves them as they are


@dataclass
class Skipped:
    """What a benchmark leaves out on this machine, and why."""

    op: str
    why: str


def cases_of(
    module: ModuleType, device: str, quick: bool, usable: set[str]
) -> Iterator[Case | Skipped]:
    """What a benchmark's module measures, unless a peer that it ``NEEDS`` is not usable.

    A module that is measured on some devices alone lists them as its ``DEVICES``. A quick run has
    one setting of each op.
    """
    name = module.__name__.rpartition("bench_")[2]
    if absent := getattr(module, "NEEDS", set()) - usable:
        yield Skipped(name, f"needs {' and '.join(sorted(absent))}, which cannot be used here")
    elif device not in (devices := getattr(module, "DEVICES", {device})):
        yield Skipped(name, f"needs --device {' or '.join(sorted(devices))}")
    else:
        seen = set()
        for case in module.cases(device, quick, usable):
            if quick and isinstance(case, Case):
                if case.op in seen:
                    continue
                seen.add(case.op)
            yield case


@dataclass
class Row:
    """One contender's figures in one case; ``None`` where there are none, as when it raised."""

    op: str
    setting: str
    contender: str
    failed: str | None = None  # the error that it raised
    repetitions: int = 0
    median_ms: float | None = None
    speedup: float | None = None  # of ours, the median of the ratios of each repetition
    goal: float | None = None  # least speed-up
    rate: float | None = None  # the case's work by the median time, in ``unit``
    unit: str | None = None  # GB/s or TFLOP/s
    fraction: float | None = None  # of the ceiling's rate
    least_fraction: float | None = None
    error: float | None = None  # largest absolute difference from the float64 truth
    peak_extra_mib: float | None = None
    most_extra_mib: float | None = None
    correct: bool = True  # of a rival: not judged

    @property
    def ours(self) -> bool:
        """Whether the contender is one of ours, and no rival."""
        return self.contender.startswith(OURS)


def measure(
    case: Case, seconds: float = 2.0, device: str = "cpu", copy_rate: float | None = None
) -> list[Row]:
    """Time every contender in turn, over and over, for about ``seconds`` a contender.

    A contender that raises drops out, and its row says why. ``copy_rate`` is what
    :func:`copy_bandwidth` found.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(case.threads or before)
    try:
        return _measure(case, seconds, device, copy_rate)
    finally:
        torch.set_num_threads(before)
        # What is frozen outlives the interpreter, and triton lists what it still holds at the end.
        gc.unfreeze()


def _measure(case: Case, seconds: float, device: str, copy_rate: float | None) -> list[Row]:
    _clean(device)
    rows = {name: Row(case.op, case.setting, name) for name in case.contenders | case.timed_only}
    runs = case.contenders | case.timed_only
    times: dict[str, list[float]] = {name: [] for name in runs}
    truth = None if case.truth is None else case.truth(case.make_input())
    clock = Clock(device, case.host_bound)

    def attempt(name: str, job: Callable[[], float | None]) -> float | None:
        try:
            return job()
        except Exception as error:
            message = str(error).strip() or "no message"
            rows[name].failed = f"{type(error).__name__}: {message.splitlines()[0][:300]}"
            del runs[name]
        return None

    for name, run in list(runs.items()):  # compiles, allocates, touches the inputs
        known = truth if name in case.contenders else None
        rows[name].error = attempt(name, lambda run=run, known=known: _error(case, run, known))
    repetition = 0
    while runs and repetition < max(_repetitions(times[name], seconds) for name in runs):
        for name, run in list(runs.items()):
            if repetition < _repetitions(times[name], seconds):
                taken = attempt(name, lambda run=run: clock(run, case.make_input()))
                times[name] += [] if taken is None else [taken]
        repetition += 1
    for name, run in list(runs.items()):
        rows[name].peak_extra_mib = attempt(
            name, lambda run=run: peak_extra_mib(run, case.make_input(), device)
        )
    for name, row in rows.items():
        _summarise(row, case, times[name])
    _compare(rows, case, times, copy_rate)
    return list(rows.values())


def _repetitions(times: list[float], seconds: float) -> int:
    """How often a contender runs, by its first repetition; a very slow one is not run again."""
    if not times:
        return 1
    least = 1 if times[0] > 10 * seconds else 3
    return max(least, min(200, int(seconds / max(times[0], 1e-6))))


def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy on ``device``: see ``COPY_DEFINITION``."""
    count = 2**28 if device == "cuda" else 2**25
    # A GPU may move zeros faster than what a job reads and writes.
    source = torch.empty(count, dtype=torch.int64, device=device).random_()
    target = torch.empty_like(source)
    clock = Clock(device, host_bound=False)
    best = min(clock(target.copy_, source) for _ in range(10))
    return 2 * source.nbytes / best


def _summarise(row: Row, case: Case, times: list[float]) -> None:
    row.repetitions = len(times)
    if row.failed is not None or not times:
        return
    median = statistics.median(times)
    row.median_ms = 1e3 * median
    row.goal = case.goals.get(row.contender)
    if row.ours:
        row.least_fraction, row.most_extra_mib = case.least_fraction, case.most_extra_mib
    if case.work is not None:
        row.unit, scale = ("GB/s", 1e9) if case.ceiling == COPY else ("TFLOP/s", 1e12)
        row.rate = case.work / median / scale


def _compare(
    rows: dict[str, Row], case: Case, times: dict[str, list[float]], copy_rate: float | None
) -> None:
    """Fill in what takes two contenders: speed-ups, the shares of the ceiling, and who is right.

    Ours must run, and be no further from float64 than the worst other, plus float32 rounding.
    """
    others = [row.error for row in rows.values() if row.error is not None and not row.ours]
    for row in rows.values():
        if row.ours:
            near = row.error is None or row.error <= max(others, default=0.0) + 1e-5
            row.correct = near and row.failed is None
    ran = {name: row for name, row in rows.items() if row.median_ms is not None}
    ours = next((times[name] for name, row in ran.items() if row.ours), None)
    if case.ceiling == COPY:
        ceiling = None if copy_rate is None else copy_rate / 1e9
    else:
        ceiling = ran[case.ceiling].rate if case.ceiling in ran else None
    for name, row in ran.items():
        if ours is not None:
            pairs = zip(times[name], ours, strict=False)  # the slow repeat fewer times
            row.speedup = statistics.median(theirs / mine for theirs, mine in pairs)
        if row.rate is not None and ceiling is not None:
            row.fraction = row.rate / ceiling


class Clock:
    """Seconds of one run: on a GPU by its own events with a flushed L2, else by the wall clock."""

    def __init__(self, device: str, host_bound: bool):
        self.cuda = device == "cuda"
        self.host_bound = host_bound
        # Several times any L2. The kernels of the run are enqueued while this is being written.
        self.flush = torch.empty(2**28 if self.cuda else 0, dtype=torch.uint8, device=device)

    def __call__(self, run: Run, argument: Any) -> float:
        """Run it once."""
        gc.disable()
        try:
            return self._on_device(run, argument) if self.cuda else self._on_host(run, argument)
        finally:
            gc.enable()

    def _on_host(self, run: Run, argument: Any) -> float:
        start = time.perf_counter()
        out = run(argument)
        elapsed = time.perf_counter() - start
        return out.seconds if isinstance(out, Measured) else elapsed

    def _on_device(self, run: Run, argument: Any) -> float:
        torch.cuda.synchronize()
        self.flush.zero_()
        if self.host_bound:
            torch.cuda.synchronize()
            return self._on_host(lambda x: (run(x), torch.cuda.synchronize()), argument)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        out = run(argument)
        end.record()
        end.synchronize()
        del out
        return start.elapsed_time(end) / 1e3


def _clean(device: str) -> None:
    """Let go of the last case: its garbage, its cached blocks, and its compiled graphs.

    torch.compile keeps a few graphs a function, and silently runs later shapes uncompiled.
    """
    gc.collect()
    gc.freeze()  # the imported libraries' objects are not this case's garbage
    if "torch._dynamo" in sys.modules:  # loading it takes seconds
        torch.compiler.reset()
    if device == "cuda":
        torch.cuda.empty_cache()


def _error(case: Case, run: Run, truth: torch.Tensor | None) -> float | None:
    out = run(case.make_input())
    if truth is None:
        return None
    answer = case.answer(out)
    if answer.shape != truth.shape:
        raise ValueError(f"expected an answer of shape {truth.shape}, got {answer.shape}")
    return (answer.double() - truth).abs().max().item()


def peak_extra_mib(run: Run, argument: Any, device: str) -> float | None:
    """Peak memory above what was there before; on the CPU from the process's high-water mark."""
    if device != "cpu":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = run(argument)
        torch.cuda.synchronize()
        del out
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    clear = Path("/proc/self/clear_refs")
    try:
        # Blocks that malloc kept from earlier runs would be used again without being counted.
        ctypes.CDLL(None).malloc_trim(0)
        clear.write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status_kib("VmRSS")
    out = run(argument)
    extra = _status_kib("VmHWM") - before
    return out.peak_extra_mib if isinstance(out, Measured) else max(extra, 0) / 1024


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected a line {name}, found none")
