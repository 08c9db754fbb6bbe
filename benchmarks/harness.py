"""Measure contenders side by side: interleaved repetitions, medians, ratios within one run."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass
class Case:
    """One setting and everyone who runs it; the first contender is the reference of the ratios."""

    op: str
    setting: str
    contenders: dict[str, Callable[[Any], Any]]
    make_input: Callable[[], Any]  # called before every repetition, outside the clock
    truth: Callable[[Any], Any] | None = None  # float64 answer to the same input
    answer: Callable[[Any], torch.Tensor] = lambda out: out  # the tensor to compare
    goals: dict[str, float] = field(default_factory=dict)  # rival -> least speed-up of "fusedrl"


@dataclass
class Row:
    """One contender's figures in one case."""

    op: str
    setting: str
    contender: str
    median_ms: float
    speedup: float  # of "fusedrl" over this contender, the median of the ratios of each repetition
    goal: float | None
    error: float | None  # largest absolute difference from the float64 truth
    peak_extra_mib: float | None


def measure(case: Case, seconds: float = 2.0, device: str = "cpu") -> list[Row]:
    """Time every contender in turn, over and over, for about ``seconds`` a contender."""
    gc.collect()
    gc.freeze()  # the imported libraries' objects are not this case's garbage
    times: dict[str, list[float]] = {name: [] for name in case.contenders}
    for run in case.contenders.values():  # compiles, allocates, touches the inputs
        _timed(run, case.make_input(), device)
    once = sum(_timed(run, case.make_input(), device) for run in case.contenders.values())
    repetitions = max(5, min(200, int(seconds * len(case.contenders) / max(once, 1e-4))))
    for _ in range(repetitions):
        for name, run in case.contenders.items():
            times[name].append(_timed(run, case.make_input(), device))
    ours = times["fusedrl"]
    rows = []
    for name, run in case.contenders.items():
        ratios = [theirs / mine for theirs, mine in zip(times[name], ours, strict=True)]
        rows.append(
            Row(
                op=case.op,
                setting=case.setting,
                contender=name,
                median_ms=1e3 * statistics.median(times[name]),
                speedup=statistics.median(ratios),
                goal=case.goals.get(name),
                error=_error(case, run),
                peak_extra_mib=_peak_extra_mib(run, case.make_input(), device),
            )
        )
    return rows


def is_correct(row: Row, case: list[Row]) -> bool:
    """Ours must not be further from float64 than the worst of the others, plus float32 rounding."""
    if row.error is None or not row.contender.startswith("fusedrl"):
        return True
    others = [
        r.error for r in case if r.error is not None and not r.contender.startswith("fusedrl")
    ]
    return row.error <= max(others, default=0.0) + 1e-5


def _timed(run: Callable[[Any], Any], argument: Any, device: str) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    gc.disable()
    start = time.perf_counter()
    out = run(argument)
    if device != "cpu":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    gc.enable()
    del out
    return elapsed


def _error(case: Case, run: Callable[[Any], Any]) -> float | None:
    if case.truth is None:
        return None
    argument = case.make_input()
    truth = case.truth(argument)
    return (case.answer(run(argument)).double() - truth).abs().max().item()


def _peak_extra_mib(run: Callable[[Any], Any], argument: Any, device: str) -> float | None:
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
    if not clear.exists():
        return None
    try:
        clear.write_text("5")
    except OSError:
        return None
    before = _status_kib("VmRSS")
    out = run(argument)
    extra = _status_kib("VmHWM") - before
    del out
    return max(extra, 0) / 1024


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status: expected a line {name}, found none")
