"""``fusedrl bench``: time every op beside what it replaces, on this machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress

from fusedrl import ops
from fusedrl.benchmarks import harness, peers  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks import results as files  # pyright: ignore[reportMissingImports]
from fusedrl.cli import alive, bench_lines, numbers
from fusedrl.cli.console import Console
from fusedrl.cli.info import collect
from fusedrl.cli.missing import requirement

if TYPE_CHECKING:
    from fusedrl.benchmarks.harness import Case, Row  # pyright: ignore[reportMissingImports]
    from fusedrl.benchmarks.results import Results  # pyright: ignore[reportMissingImports]

OPS = (
    *ops.OPS,
    *(
        "retrieve_kl",
        "shared_prefix",
        "ranks",
        "trl",
        "channel",
        "collectors",
        "grpo_step",
        "supervised",
        "async_collector",
        "vllm",
    ),
)
SECONDS, QUICK_SECONDS = 2.0, 0.1
QUICK_SETTINGS = 1  # of each op, with --quick
QUICK_LIMIT = 100.0  # seconds, so that it ends within two minutes on a slow machine too
_PLOTS = "fusedrl.benchmarks.plots"  # imports matplotlib
NOT_QUICK = ("ranks", "grpo_step", "async_collector", "vllm")  # they start processes, or train

EXAMPLES = """\
examples:
  fusedrl bench --quick                # one setting of each op, in two minutes
  fusedrl bench --op token_kl          # all settings of one op
  fusedrl bench --op token_kl --plots plots                 # and plots of them
  fusedrl bench --plots plots --from bench-out/bench.json   # plots alone

exit codes:
  0    all answers of fusedrl are right
  1    an answer of fusedrl is wrong, or one of its ops did not run
  2    the arguments are refused, or a result cannot be written
  130  Ctrl-C; what was measured until then is printed, stored and plotted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``fusedrl bench``."""
    parser.add_argument(
        "--op",
        choices=OPS,
        action="append",
        metavar="OP",
        help=f"measure only this op; may be given several times: {', '.join(OPS)}",
    )
    parser.add_argument(
        "--device",
        default="cpu",
        choices=("cpu", "cuda"),
        help="where the ops run (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=numbers.count,
        default=2,
        metavar="N",
        help="CPU threads of torch (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=numbers.above_zero,
        metavar="S",
        help="how long each contender runs in each setting "
        f"(default: {SECONDS:g}, with --quick {QUICK_SECONDS:g})",
    )
    parser.add_argument(
        "--limit",
        type=numbers.not_negative,
        metavar="S",
        help="start no setting after so many seconds "
        f"(default: no limit, with --quick {QUICK_LIMIT:g})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="measure one of the smaller settings of each op, in at most two minutes",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="compare with Liger and cut-cross-entropy too, where they are installed",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench-out"),
        metavar="DIR",
        help="folder of the results (default: %(default)s)",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="write SVG plots into this folder, too"
    )
    parser.add_argument(
        "--from",
        dest="stored",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --plots: plot these bench.json files, and measure nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print each case's rows when they are known, write ``bench.json`` and plots."""
    try:
        return _run(args)
    except BrokenPipeError:
        raise
    except OSError as error:  # contenders' own are in the results
        folder = args.out if args.stored is None else args.plots
        where, why = error.filename or folder, error.strerror or error
        return _refuse(f"cannot write {where}: {why}; make room there, or name another folder")


def _run(args: argparse.Namespace) -> int:
    if args.stored is not None:
        return _plot_stored(args)
    for option, folder in (("--out", args.out), ("--plots", args.plots)):
        if folder is not None and (why := _unmade(option, folder)):
            return _refuse(why)
    if args.plots is not None:
        importlib.import_module(_PLOTS)  # so that a missing package is told before hours of work
    if args.device == "cuda" and not torch.cuda.is_available():
        return _refuse("--device cuda: expected a CUDA device, torch finds none; use --device cpu")
    torch.set_num_threads(args.threads)
    console = Console()
    copy_rate = harness.copy_bandwidth(args.device)
    results = files.Results(_facts(args, copy_rate))
    _measure(args, results, console, copy_rate)
    results.write(args.out / "bench.json")
    for note in bench_lines.notes(results):
        _print(console, note)
    _print(console, f"wrote {args.out / 'bench.json'}")
    _draw_overview(results, args.out / "bench.png", console)
    if args.plots is not None:
        _plot([results], args.plots, console)
    if results.interrupted is not None:
        return 128 + signal.SIGINT
    return 1 if results.wrong or results.failed else 0


def _refuse(why: str) -> int:
    print(f"bench: {why}", file=sys.stderr)
    return 2


def _draw_overview(results: Results, path: Path, console: Console) -> None:
    """Draw one picture of everything, where matplotlib is installed: figures need no package."""
    if importlib.util.find_spec("matplotlib") is None:
        wanted = requirement("matplotlib")
        _print(console, f'{path}: not drawn: needs matplotlib: pip install "{wanted}"')
        return
    importlib.import_module(_PLOTS).write_overview(results.trusted, path)
    _print(console, f"wrote {path}")


def _plot_stored(args: argparse.Namespace) -> int:
    if args.plots is None:
        return _refuse("--from: expected --plots DIR beside it, got none; add --plots DIR")
    try:
        stored = [files.read(path) for path in args.stored]
    except (OSError, ValueError) as error:
        return _refuse(f"--from: {error}")
    if why := _unmade("--plots", args.plots):
        return _refuse(why)
    _plot(stored, args.plots, Console())
    return 0


def _unmade(option: str, folder: Path) -> str | None:
    """Make a folder; why it cannot be made, if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"{option}: cannot write into {folder}: {error.strerror or error}"
    return None


def _plot(measured: list[Results], folder: Path, console: Console) -> None:
    rows = [row for results in measured for row in results.trusted]
    written = importlib.import_module(_PLOTS).write(rows, files.caption(measured), folder)
    _print(console, f"wrote {len(written)} plots into {folder}")


def _measure(
    args: argparse.Namespace, results: Results, console: Console, copy_rate: float
) -> None:
    """Run case after case; Ctrl-C ends the loop and keeps what was measured."""
    limit = (QUICK_LIMIT if args.quick else math.inf) if args.limit is None else args.limit
    end = time.monotonic() + limit
    seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    op, running = None, "the preparation"
    with (
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
        alive.told("bench", lambda: f"measuring {running}", terminal=console.is_terminal),
        _no_warning_between_rows(results),
    ):
        progress.add_task("measuring", total=None)
        try:
            for case in _cases(args, results):
                running = f"{case.op} {case.setting}"
                if time.monotonic() > end:
                    results.skipped["the rest"] = f"not started: {limit:.0f} s were over"
                    break
                if case.op != op:
                    op = case.op
                    _print(console, f"\n{op}: medians; speed-ups are those of fusedrl")
                    _print(console, bench_lines.heading())
                _print(console, case.setting)
                try:
                    measured = harness.measure(case, seconds, args.device, copy_rate)
                except Exception as error:
                    # The input or the truth raised; what a contender raises stands in its row.
                    results.failed[running] = f"{type(error).__name__}: {error}"
                    continue
                for row in _kept(measured, results):
                    _print(console, bench_lines.line(row, row in results.wrong))
                results.write(args.out / "bench.json")  # for a run that is killed later
        except KeyboardInterrupt:
            results.interrupted = running


@contextmanager
def _no_warning_between_rows(results: Results) -> Iterator[None]:
    """Keep warnings for the notes at the end, each once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield
    results.warnings = list(dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught))


def _kept(measured: list[Row], results: Results) -> list[Row]:
    results.rows += measured
    results.wrong += [row for row in measured if not harness.is_correct(row, measured)]
    return measured


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _facts(args: argparse.Namespace, copy_rate: float) -> dict[str, Any]:
    return {
        "machine": collect(),
        "commit": _commit(),
        "threads": args.threads,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "ceilings": {"copy GB/s": copy_rate / 1e9, "definition": harness.COPY_DEFINITION},
        "absent": peers.absent(args.device, args.peers),
    }


def _cases(args: argparse.Namespace, results: Results) -> Iterator[Case]:
    """The cases of every op asked for; an op whose cases raise does not stop the others."""
    usable = set(peers.MODULES) - results.facts["absent"].keys()
    settings: Counter[str] = Counter()
    for name in _ops(args, results):
        try:
            module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
            for case in harness.cases_of(module, args.device, args.quick, usable):
                if isinstance(case, harness.Skipped):
                    results.skipped[case.op] = case.why
                elif not args.quick or settings[case.op] < QUICK_SETTINGS:
                    settings[case.op] += 1
                    yield case
        except Exception as error:
            results.failed[name] = f"{type(error).__name__}: {error}"


def _ops(args: argparse.Namespace, results: Results) -> list[str]:
    """Those asked for, or all of them; --quick leaves out what takes minutes."""
    if args.op or not args.quick:
        return args.op or list(OPS)
    results.skipped |= dict.fromkeys(NOT_QUICK, "takes minutes: name it with --op")
    return [name for name in OPS if name not in NOT_QUICK]


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
