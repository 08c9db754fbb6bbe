"""Plots of results, as SVG for light and for dark pages: the headlines, and every row of an op."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from .harness import Row
from .headlines import Comparison, comparisons

GOAL = "#c33"


@dataclass(frozen=True)
class Palette:
    """Colours of one page; plots have no background of their own."""

    name: str
    text: str
    faint: str
    bar: str


PALETTES = (
    Palette("light", text="#1f2328", faint="#59636e", bar="#2f6fb3"),
    Palette("dark", text="#f0f6fc", faint="#9198a1", bar="#58a6ff"),
)

# Text stays text, in a font of the reader's that is no wider than the one measured with; the same
# results give the same file.
_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "fusedrl", "font.family": "sans-serif"}

_TITLE = "How many times faster than torchrl, TRL and plain torch"
_LEGEND = "in grey: their time → ours, and their memory → ours where much is saved"


def write(rows: list[Row], caption: str, folder: Path) -> list[Path]:
    """Write ``comparison-*.svg`` and ``OP-*.svg`` into ``folder``, and return their paths.

    Each is written once for light pages and once for dark ones. There is no comparison where
    ``rows`` have no headline, and no plot of an op without a rival.
    """
    shown = comparisons(rows)
    written = []
    for palette in PALETTES:
        with plt.rc_context(_STYLE | _colours(palette)):
            if shown:
                path = folder / f"comparison-{palette.name}.svg"
                written.append(_save(_comparison(shown, caption, palette), path))
            for op in dict.fromkeys(row.op for row in rivals(rows)):
                slug = re.sub("[^a-z0-9]+", "-", op.lower()).strip("-")
                of_op = [row for row in rows if row.op == op]
                figure = _bars(of_op, palette, title=op)
                written.append(_save(figure, folder / f"{slug}-{palette.name}.svg"))
    return written


def write_overview(rows: list[Row], path: Path) -> None:
    """Every speed-up of ``rows`` in one PNG, on white."""
    figure = _bars(rows, PALETTES[0], title=None)
    figure.savefig(path, dpi=72)
    plt.close(figure)


def rivals(rows: Iterable[Row]) -> list[Row]:
    """The rows with a speed-up of ours over somebody else."""
    return [row for row in rows if not row.ours and row.speedup is not None]


def _colours(palette: Palette) -> dict[str, str]:
    names = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor")
    return dict.fromkeys(names, palette.text)


def _save(figure: plt.Figure, path: Path) -> Path:
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})
    plt.close(figure)
    return path


def _comparison(shown: list[Comparison], caption: str, palette: Palette) -> plt.Figure:
    """A bar a headline, with what it means at its left and the figures at its right."""
    figure, axes = plt.subplots(figsize=(6.2, 0.9 + 0.52 * len(shown)))
    places = range(len(shown))
    axes.barh(places, [one.speedup for one in shown], height=0.62, color=palette.bar)
    axes.axvline(1, color=palette.faint, linewidth=1, linestyle=(0, (3, 3)))
    left = axes.get_yaxis_transform()
    for place, one in zip(places, shown, strict=True):
        axes.text(-0.02, place - 0.17, one.title, transform=left, ha="right", va="center", size=10)
        axes.text(
            -0.02, place + 0.22, one.detail, transform=left, ha="right", va="center", size=7.5,
            color=palette.faint,
        )  # fmt: skip
        axes.annotate(
            _times(one.speedup), (one.speedup, place), (5, 4), textcoords="offset points",
            va="center", size=10, weight="bold",
        )  # fmt: skip
        axes.annotate(
            _figures(one), (one.speedup, place), (5, -8), textcoords="offset points",
            va="center", size=7.5, color=palette.faint,
        )  # fmt: skip
    axes.set_xlim(0, 1.35 * max(one.speedup for one in shown))
    axes.set_ylim(len(shown) - 0.4, -0.9)
    axes.set_yticks([])
    axes.set_xticks([1], ["as fast"], size=7.5, color=palette.faint)
    axes.tick_params(axis="x", length=0)
    axes.spines[:].set_visible(False)
    axes.text(0, 1.06, _TITLE, transform=axes.transAxes, ha="center", size=13, weight="bold")
    axes.text(0, 1.015, _LEGEND, transform=axes.transAxes, ha="center", size=8, color=palette.faint)
    axes.set_xlabel(caption, size=7.5, color=palette.faint, x=1, ha="right")
    return figure


def _figures(one: Comparison) -> str:
    """The rival's time and ours, and the memory beside the input where ours is far less."""
    times = f"{_duration(one.rival.median_ms or 0.0)} → {_duration(one.ours.median_ms or 0.0)}"
    theirs, ours = one.rival.peak_extra_mib, one.ours.peak_extra_mib
    if theirs is None or ours is None or theirs < 50 or ours > theirs / 4:
        return times
    return f"{times},  {_memory(theirs)} → {_memory(ours)}"


def _times(speedup: float) -> str:
    return f"{speedup:.0f}x" if speedup >= 9.5 else f"{speedup:.1f}x"


def _duration(ms: float) -> str:
    if ms >= 1000:
        return f"{ms / 1000:.1f} s"
    return f"{ms:.0f} ms" if ms >= 10 else f"{ms:.1f} ms"


def _memory(mib: float) -> str:
    if mib >= 1024:
        return f"{mib / 1024:.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 1 else "under 1 MiB"


def _bars(rows: list[Row], palette: Palette, title: str | None) -> plt.Figure:
    """A bar a rival, on a logarithmic scale, with the goals; of one op where ``title`` names it."""
    compared = rivals(rows)
    labels = [f"{row.setting}, over {row.contender}" for row in compared]
    if title is None:
        labels = [f"{row.op} {label}" for row, label in zip(compared, labels, strict=True)]
    speedups = [row.speedup or 0.0 for row in compared]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.28 * len(compared)), layout="constrained")
    bars = axes.barh(labels, speedups, color=palette.bar)
    axes.bar_label(bars, [_times(speedup) for speedup in speedups], padding=3, fontsize=8)
    goals = [(row.goal, label) for row, label in zip(compared, labels, strict=True) if row.goal]
    if goals:
        at, of = zip(*goals, strict=True)
        axes.plot(at, of, "|", color=GOAL, markersize=12, label="goal")
        axes.legend(loc="lower right")
    axes.axvline(1, color=palette.faint, linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of fusedrl (medians of interleaved repetitions)")
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(title or "")
    return figure
