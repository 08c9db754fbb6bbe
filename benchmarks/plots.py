"""Plots of results, as SVG for light and for dark pages: the headlines, and every row of an op."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

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


@dataclass(frozen=True)
class Bar:
    """What one bar shows."""

    title: str
    detail: str
    speedup: float
    figures: str = ""
    goal: float | None = None


PALETTES = (
    Palette("light", text="#1f2328", faint="#59636e", bar="#2f6fb3"),
    Palette("dark", text="#f0f6fc", faint="#9198a1", bar="#58a6ff"),
)

# Text stays text, in a font of the reader's that is no wider than the one measured with; the same
# results give the same file.
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fusedrl",
    "font.family": "sans-serif",
    "font.size": 9,
}

_TITLE = "Speed-up over torchrl, TRL and plain torch"
_LEGEND = (
    "Bars: median of the ratios of interleaved repetitions. Right: median time, baseline → "
    "fusedrl, and peak memory above the inputs if the difference is large"
)
_WIDTH = 5.2  # inches: on a phone, whose pages are 4 wide, text keeps three quarters of its size


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
                figure = _speedups(of_op, palette, title=op)
                written.append(_save(figure, folder / f"{slug}-{palette.name}.svg"))
    return written


def write_overview(rows: list[Row], path: Path) -> None:
    """Every speed-up of ``rows`` in one PNG, on white."""
    figure = _speedups(rows, PALETTES[0], title=None)
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
    """A bar a headline: what it means above it, and the figures at its right."""
    bars = [Bar(one.title, one.detail, one.speedup, figures=_figures(one)) for one in shown]
    figure, axes = _bars(bars, palette, _TITLE, start=0)
    axes.set_xticks([])
    axes.spines.bottom.set_visible(False)
    axes.set_xlim(0, 2.5 * max(bar.speedup for bar in bars))
    axes.set_xlabel("\n".join(wrap(f"{_LEGEND}. {caption}", 78)), size=8, color=palette.faint)
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


def _speedups(rows: list[Row], palette: Palette, title: str | None) -> plt.Figure:
    """A bar a rival from 1 on, on a logarithmic scale, with the goals; ``title`` names one op."""
    bars = [
        Bar(
            "" if title else row.op,
            f"{row.setting}, vs. {row.contender}",
            row.speedup or 0.0,
            goal=row.goal,
        )
        for row in rivals(rows)
    ]
    figure, axes = _bars(bars, palette, title or "", start=1)
    axes.set_xscale("log")
    speedups = [1.0, *(bar.speedup for bar in bars)]
    axes.set_xlim(0.8 * min(speedups), 2 * max(speedups))
    axes.set_xlabel("speed-up of fusedrl (median of interleaved repetitions)", size=8)
    return figure


def _bars(
    bars: list[Bar], palette: Palette, title: str, start: float
) -> tuple[plt.Figure, plt.Axes]:
    """Bars below their texts, in a figure that is narrow enough for a phone; y is in inches."""
    y, places, texts = 0.0, [], []
    for bar in bars:
        for text, columns, colour in (
            (bar.title, 60, palette.text),
            (bar.detail, 76, palette.faint),
        ):
            for line in wrap(text, columns):
                texts.append((y + 0.07, line, colour))
                y += 0.16
        places.append(y + 0.09)
        y += 0.3
    figure, axes = plt.subplots(figsize=(_WIDTH, y + 0.9), layout="constrained")
    for place, line, colour in texts:
        axes.text(
            0, place, line, transform=axes.get_yaxis_transform(), va="center", color=colour,
            in_layout=False,
        )  # fmt: skip
    axes.barh(places, [bar.speedup - start for bar in bars], 0.15, start, color=palette.bar)
    for place, bar in zip(places, bars, strict=True):
        axes.annotate(
            _times(bar.speedup), (max(bar.speedup, start), place), (4, 0), va="center",
            textcoords="offset points", weight="bold",
        )  # fmt: skip
        axes.text(
            1, place, bar.figures, transform=axes.get_yaxis_transform(), ha="right", va="center",
            color=palette.faint,
        )  # fmt: skip
    goals = [(bar.goal, place) for bar, place in zip(bars, places, strict=True) if bar.goal]
    if goals:
        axes.plot(*zip(*goals, strict=True), "|", color=GOAL, markersize=12, label="goal")
        axes.legend(loc="lower right")
    axes.set_ylim(y, -0.1)
    axes.set_yticks([])
    axes.spines[["top", "left", "right"]].set_visible(False)
    figure.suptitle("\n".join(wrap(title, 58)), size=10.5, weight="bold")
    return figure, axes
