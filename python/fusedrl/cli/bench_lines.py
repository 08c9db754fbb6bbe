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
_NARROW = {"contender": 23, "ms": 9, "speed-up": 8, "extra MiB": 9}
WIDE = 2 + sum(width + 1 for width in _COLUMNS.values())


def heading(width: int) -> str:
    """The names of the columns, which are fewer where the terminal is not ``WIDE``."""
    return _line(dict(zip(_COLUMNS, _COLUMNS, strict=True)), width)


def line(row: Row, wrong: bool, width: int) -> str:
    """One contender: milliseconds, speed-up, rate, share of the ceiling, error and memory.

    A line of a narrow terminal says only of a wrong answer whether it is right.
    """
    correct = "no" if wrong else "yes" if row.ours else ""
    cells = [row.contender, *_figures(row), correct]
    made = _line(dict(zip(_COLUMNS, cells, strict=True)), width)
    return f"{made}\n    a wrong answer" if wrong and width < WIDE else made


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
    lines += results.warnings
    if results.interrupted is not None:
        lines.append(f"interrupted in {results.interrupted}, which is left out")
    return lines


def _line(cells: dict[str, str], width: int) -> str:
    columns = _COLUMNS if width >= WIDE else _NARROW
    (name, room), *others = columns.items()
    if len(cells[name]) > room:  # the figures then stand in a line of their own
        return f"  {cells[name]}\n" + _line(cells | {name: ""}, width)
    figures = "".join(f" {cells[other]:>{room}}" for other, room in others)
    return f"  {cells[name]:<{room}}{figures}".rstrip()


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
