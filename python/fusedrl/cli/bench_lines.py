"""What ``fusedrl bench`` prints: a heading, a line for each contender, and notes at the end."""

from __future__ import annotations

from fusedrl.benchmarks import harness  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks.harness import Row  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks.results import Results  # pyright: ignore[reportMissingImports]

SPEED_UP = (
    "speed-up: the contender's time over that of fusedrl, the median of the ratios of adjacent "
    "repetitions"
)
CEILING = (
    "of ceiling: the share of the rate of a bare copy, or of a bare matrix product; blank where "
    "the rate is higher, as it is for data that lies in a cache"
)
_COLUMNS = {
    "contender": 32,
    "ms": 10,
    "speed-up": 9,
    "rate": 13,
    "of ceiling": 10,
    "max error": 9,
    "extra MiB": 9,
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
    lines = [SPEED_UP, CEILING, f"copy: {rate:.1f} GB/s: {harness.COPY_DEFINITION}"]
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
    room, *rooms = _COLUMNS.values()
    name, *figures = cells
    if len(name) > room:  # the figures then stand in a line of their own
        return f"  {name}\n" + _line(["", *figures])
    shown = "".join(f" {cell:>{wide}}" for cell, wide in zip(figures, rooms, strict=True))
    return f"  {name:<{room}}{shown}".rstrip()


def _figures(row: Row) -> list[str]:
    """The columns between the contender and whether it is right."""
    if row.median_ms is None:
        return ["failed", *[""] * 5]
    below = row.fraction is not None and row.fraction <= 1
    return [
        f"{row.median_ms:.3f}",
        "" if row.speedup is None else f"{row.speedup:.2f}x",
        "" if row.rate is None else f"{row.rate:.3g} {row.unit}",
        f"{row.fraction:.0%}" if below else "",
        "" if row.error is None else f"{row.error:.1e}",
        "" if row.peak_extra_mib is None else f"{row.peak_extra_mib:.1f}",
    ]
