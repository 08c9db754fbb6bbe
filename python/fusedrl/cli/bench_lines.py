"""What ``fusedrl bench`` prints: a heading, a line for each contender, and notes at the end."""

from __future__ import annotations

from fusedrl.benchmarks import harness  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks.harness import Row  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks.results import Results  # pyright: ignore[reportMissingImports]

SPEED_UP = (
    "speed-up: the contender's time over that of fusedrl, the median of the ratios of adjacent "
    "repetitions; what stands in brackets is a goal, for which no exit code stands"
)
_COLUMNS = {
    "contender": 32,
    "ms": 10,
    "speed-up": 20,
    "rate": 13,
    "of ceiling": 15,
    "max error": 9,
    "extra MiB": 18,
    "correct": 7,
}


def heading() -> str:
    """The names of the columns."""
    return _line(list(_COLUMNS))


def line(row: Row, wrong: bool) -> str:
    """One contender: milliseconds, speed-up, rate, share of the ceiling, error and memory."""
    correct = "no" if wrong else "yes" if row.ours else ""
    return _line([row.contender, *_figures(row), correct])


def notes(results: Results) -> list[str]:
    """What the figures mean, and what is absent, was skipped, failed or was interrupted."""
    rate = results.facts["ceilings"]["copy GB/s"]
    lines = [SPEED_UP, f"copy: {rate:.1f} GB/s: {harness.COPY_DEFINITION}"]
    lines += [f"{name}: absent: {why}" for name, why in results.facts["absent"].items()]
    lines += [f"{op}: skipped: {why}" for op, why in results.skipped.items()]
    lines += [f"{op}: failed: {why}" for op, why in results.failed.items()]
    lines += [
        f"{row.op} {row.setting}, {row.contender}: failed: {row.failed}"
        for row in results.rows
        if row.failed
    ]
    if results.interrupted is not None:
        lines.append(f"interrupted in {results.interrupted}, which is left out")
    return lines


def _line(cells: list[str]) -> str:
    first, *others = zip(cells, _COLUMNS.values(), strict=True)
    name, width = first
    return f"  {name:<{width}}" + "".join(f" {cell:>{width}}" for cell, width in others).rstrip()


def _figures(row: Row) -> list[str]:
    """The columns between the contender and whether it is right, goals in brackets."""
    if row.median_ms is None:
        return ["failed", *[""] * 5]
    return [
        f"{row.median_ms:.3f}",
        _speedup(row),
        "" if row.rate is None else f"{row.rate:.3g} {row.unit}",
        _with_goal(row.fraction, row.least_fraction, "{:.0%}", ">="),
        "" if row.error is None else f"{row.error:.1e}",
        _with_goal(row.peak_extra_mib, row.most_extra_mib, "{:.1f}", "<="),
    ]


def _speedup(row: Row) -> str:
    if row.speedup is None:
        return ""
    if row.goal is not None and row.goal < 1:  # a goal for the time: at most so many times as long
        return f"in {1 / row.speedup:.2f}x (<= {1 / row.goal:.2f}x)"
    return _with_goal(row.speedup, row.goal, "{:.2f}x", ">=")


def _with_goal(figure: float | None, goal: float | None, form: str, relation: str) -> str:
    if figure is None:
        return ""
    return form.format(figure) + ("" if goal is None else f" ({relation} {form.format(goal)})")
