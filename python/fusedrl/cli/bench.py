"""``fusedrl bench``: time every op beside what it replaces, on this machine."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from fusedrl.benchmarks import harness, peers  # pyright: ignore[reportMissingImports]
from fusedrl.cli.console import Console
from fusedrl.cli.info import collect

if TYPE_CHECKING:
    from fusedrl.benchmarks.harness import Case, Row  # pyright: ignore[reportMissingImports]

OPS = (
    "token_log_probs",
    "token_kl",
    "linear_token_log_probs",
    "linear_policy_loss",
    "exact_kl",
    "linear_exact_kl",
    "importance_weights",
    "retrieve_kl",
    "trl",
    "channel",
    "collectors",
    "grpo_step",
    "async_collector",
    "vllm",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fusedrl bench``."""
    parser.add_argument("--op", choices=OPS, action="append", help="only this op (repeatable)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=2, help="torch's CPU threads (default: 2)")
    parser.add_argument("--seconds", type=float, default=2.0, help="time a contender (default: 2)")
    parser.add_argument("--limit", type=float, help="start no case after so many seconds")
    parser.add_argument("--quick", action="store_true", help="the smaller shapes only")
    parser.add_argument(
        "--peers", action="store_true", help="beside Liger and cut-cross-entropy, where installed"
    )
    parser.add_argument("--commit", help="commit to record where git does not know it")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder of the results")


@dataclass
class Results:
    """What ``bench.json`` holds, and which of its rows are wrong."""

    facts: dict[str, Any]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    wrong: list[Row] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """As JSON, every row with all its columns."""
        rows = [asdict(row) | {"correct": row not in self.wrong} for row in self.rows]
        data = self.facts | {"skipped": self.skipped, "failed": self.failed, "rows": rows}
        path.write_text(json.dumps(data, indent=1) + "\n")


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, write ``bench.json`` and ``bench.png``.

    The exit code is 1 for a wrong answer, and for an op of ours that did not run.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        print("bench: --device cuda: expected a CUDA device, torch finds none; use --device cpu")
        return 2
    torch.set_num_threads(args.threads)
    console = Console()
    console.width = max(console.width, 180)  # a table cut to a pipe's 80 columns helps nobody
    copy_rate = harness.copy_bandwidth(args.device)
    results = Results(_facts(args, copy_rate))
    args.out.mkdir(parents=True, exist_ok=True)
    end = math.inf if args.limit is None else time.monotonic() + args.limit
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("bench", total=None)
        for case in _cases(args, results):
            if time.monotonic() > end:
                results.failed["the rest"] = f"not started: {args.limit:.0f} s were over"
                break
            progress.update(task, description=f"{case.op} {escape(case.setting)}")
            if not console.is_terminal:  # a log tells how far the run came
                console.print(f"{case.op} {escape(case.setting)}", highlight=False)
            try:
                measured = harness.measure(case, args.seconds, args.device, copy_rate)
            except Exception as error:  # of the input or the truth; a contender's is its row's
                results.failed[f"{case.op} {case.setting}"] = f"{type(error).__name__}: {error}"
                continue
            results.rows += measured
            results.wrong += [row for row in measured if not harness.is_correct(row, measured)]
            results.write(args.out / "bench.json")  # so that a run cut short leaves its results
    results.write(args.out / "bench.json")
    _plot(results.rows, args.out / "bench.png")
    _print(console, results)
    console.print(f"wrote {args.out / 'bench.json'} and {args.out / 'bench.png'}")
    return 1 if results.wrong or results.failed else 0


def _facts(args: argparse.Namespace, copy_rate: float) -> dict[str, Any]:
    return {
        "machine": collect(),
        "commit": _commit() or args.commit,
        "threads": args.threads,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "ceilings": {"copy GB/s": copy_rate / 1e9, "definition": harness.COPY_DEFINITION},
        "absent": peers.absent(args.device, args.peers),
    }


def _cases(args: argparse.Namespace, results: Results) -> Iterator[Case]:
    """The cases of every op asked for; an op whose cases raise does not stop the others."""
    usable = set(peers.MODULES) - results.facts["absent"].keys()
    for name in args.op or OPS:
        try:
            module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
            for case in module.cases(args.device, args.quick, usable):
                if isinstance(case, harness.Skipped):
                    results.skipped[case.op] = case.why
                else:
                    yield case
        except Exception as error:
            results.failed[name] = f"{type(error).__name__}: {error}"


def _print(console: Console, results: Results) -> None:
    for op in dict.fromkeys(row.op for row in results.rows):
        console.print(_table(op, results))
    rate = results.facts["ceilings"]["copy GB/s"]
    console.print(f"copy: {rate:.1f} GB/s: {harness.COPY_DEFINITION}", highlight=False)
    notes = [
        *((f"{name}: absent", why) for name, why in results.facts["absent"].items()),
        *((f"{op}: skipped", why) for op, why in results.skipped.items()),
        *((f"{op}: failed", why) for op, why in results.failed.items()),
        *(
            (f"{r.op} {r.setting}, {r.contender}: failed", r.failed)
            for r in results.rows
            if r.failed
        ),
    ]
    for what, why in notes:
        console.print(escape(f"{what}: {why}"), highlight=False)


def _table(op: str, results: Results) -> Table:
    table = Table(title=f"{op}: medians; speed-ups are those of fusedrl")
    for column in ("setting", "contender"):
        table.add_column(column, no_wrap=True)
    for column in ("ms", "speed-up", "rate", "of ceiling", "max error", "extra MiB", "correct"):
        table.add_column(column, justify="right")
    previous = None
    for row in (row for row in results.rows if row.op == op):
        if previous not in (None, row.setting):
            table.add_section()
        shown = "" if row.setting == previous else escape(row.setting)
        previous = row.setting
        correct = "no" if row in results.wrong else "yes" if row.ours else ""
        table.add_row(shown, row.contender, *_figures(row), correct)
    return table


def _figures(row: Row) -> list[str]:
    """Milliseconds, speed-up, rate, share of the ceiling, error and memory, goals in brackets."""
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
    if row.goal is not None and row.goal < 1:  # the goal is to take at most so many times as long
        return f"in {1 / row.speedup:.2f}x (<= {1 / row.goal:.2f}x)"
    return _with_goal(row.speedup, row.goal, "{:.2f}x", ">=")


def _with_goal(figure: float | None, goal: float | None, form: str, relation: str) -> str:
    if figure is None:
        return ""
    return form.format(figure) + ("" if goal is None else f" ({relation} {form.format(goal)})")


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rivals = [row for row in rows if not row.ours and row.speedup is not None]
    labels = [f"{row.op} {row.setting}, over {row.contender}" for row in rivals]
    speedups = [row.speedup or 0.0 for row in rivals]
    figure, axes = plt.subplots(figsize=(11, 1 + 0.28 * len(rivals)), layout="constrained")
    bars = axes.barh(labels, speedups, color="#3b6ea8")
    axes.bar_label(bars, [f"{speedup:.2g}x" for speedup in speedups], padding=3, fontsize=8)
    axes.plot(
        [row.goal for row in rivals if row.goal],
        [label for row, label in zip(rivals, labels, strict=True) if row.goal],
        "|",
        color="#c33",
        markersize=12,
        label="goal",
    )
    axes.axvline(1, color="#888", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(y=0.005)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up of fusedrl (medians of interleaved repetitions)")
    axes.tick_params(axis="y", labelsize=8)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=72)
    plt.close(figure)


def _commit() -> str | None:
    """The commit of the checkout that the benchmarks lie in, if they lie in one."""
    command: list[Any] = ["git", "-C", Path(harness.__file__).resolve().parent]
    try:
        found = subprocess.run(
            [*command, "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:  # no git
        return None
    return found.stdout.strip() or None
