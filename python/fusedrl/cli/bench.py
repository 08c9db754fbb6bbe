"""``fusedrl bench``: time every op beside what it replaces, on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fusedrl.benchmarks import harness  # pyright: ignore[reportMissingImports]
from fusedrl.cli.info import collect

if TYPE_CHECKING:
    from fusedrl.benchmarks.harness import Case, Row  # pyright: ignore[reportMissingImports]

OPS = ("token_log_probs", "token_kl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fusedrl bench``."""
    parser.add_argument("--op", choices=OPS, action="append", help="only this op (repeatable)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads (default: 2)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time a contender (default: 2)")
    parser.add_argument("--quick", action="store_true", help="the smaller shapes only")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the results")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write ``bench.json`` and ``bench.png``; 1 for a wrong answer."""
    torch.set_num_threads(args.threads)
    console = Console()
    console.width = max(console.width, 130)  # a table cut to a pipe's 80 columns helps nobody
    rows: list[Row] = []
    wrong: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bench", total=None)
        for case in _cases(args):
            progress.update(task, description=f"{case.op} {case.setting}")
            measured = harness.measure(case, args.seconds, args.device)
            rows += measured
            wrong += [row for row in measured if not harness.is_correct(row, measured)]
    console.print(_table(rows, wrong))
    args.out.mkdir(parents=True, exist_ok=True)
    results = {"machine": collect(), "commit": _commit(), "threads": args.threads}
    results["time"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    results["rows"] = [asdict(row) for row in rows]
    (args.out / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    _plot(rows, args.out / "bench.png")
    console.print(f"wrote {args.out / 'bench.json'} and {args.out / 'bench.png'}")
    return 1 if wrong else 0


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    for name in args.op or OPS:
        module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
        yield from module.cases(args.device, args.quick)


def _table(rows: list[Row], wrong: list[Row]) -> Table:
    table = Table(title="speed-up of fusedrl, medians of interleaved repetitions")
    for column in ("op", "setting", "contender"):
        table.add_column(column)
    for column in ("median ms", "speed-up", "goal", "max error", "extra MiB", "correct"):
        table.add_column(column, justify="right")
    previous = None
    for row in rows:
        key = (row.op, row.setting)
        if previous not in (None, key):
            table.add_section()
        shown = ("", "") if key == previous else key
        previous = key
        table.add_row(
            *shown,
            row.contender,
            f"{row.median_ms:.3f}",
            "" if row.contender == "fusedrl" else f"{row.speedup:.1f}x",
            "" if row.goal is None else f"{row.goal:.0f}x",
            "" if row.error is None else f"{row.error:.1e}",
            "" if row.peak_extra_mib is None else f"{row.peak_extra_mib:.1f}",
            "no" if row in wrong else "yes",
        )
    return table


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rivals = [row for row in rows if not row.contender.startswith("fusedrl")]
    labels = [f"{row.op} {row.setting}, over {row.contender}" for row in rivals]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.28 * len(rivals)), layout="constrained")
    bars = axes.barh(labels, [row.speedup for row in rivals], color="#3b6ea8")
    axes.bar_label(bars, [f"{row.speedup:.1f}x" for row in rivals], padding=3, fontsize=8)
    axes.plot(
        [row.goal for row in rivals if row.goal],
        [label for row, label in zip(rivals, labels, strict=True) if row.goal],
        "|",
        color="#c33",
        markersize=12,
        label="goal",
    )
    axes.axvline(1, color="#888", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of fusedrl (medians of interleaved repetitions)")
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _commit() -> str | None:
    """The commit of the checkout that the benchmarks lie in, if they lie in one."""
    command: list[Any] = ["git", "-C", Path(harness.__file__).resolve().parent]
    found = subprocess.run(
        [*command, "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or None
