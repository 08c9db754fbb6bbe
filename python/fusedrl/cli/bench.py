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
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fusedrl.benchmarks import harness, peers  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks import results as files  # pyright: ignore[reportMissingImports]
from fusedrl.cli import bench_lines
from fusedrl.cli.info import collect, requirement

if TYPE_CHECKING:
    from fusedrl.benchmarks.harness import Case  # pyright: ignore[reportMissingImports]
    from fusedrl.benchmarks.results import Results  # pyright: ignore[reportMissingImports]

OPS = sorted(
    path.stem.removeprefix("bench_") for path in Path(harness.__file__).parent.glob("bench_*.py")
)
SECONDS, QUICK_SECONDS = 2.0, 0.1
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
        type=whole_number,
        default=2,
        metavar="N",
        help="CPU threads of torch (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=duration,
        metavar="S",
        help="how long each contender runs in each setting "
        f"(default: {SECONDS:g}, with --quick {QUICK_SECONDS:g})",
    )
    parser.add_argument(
        "--limit",
        type=duration,
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


def whole_number(text: str) -> int:
    """A number of at least 1; argparse says of other texts that they are no ``whole_number``."""
    if int(text) < 1:
        raise ValueError
    return int(text)


def duration(text: str) -> float:
    """Seconds above 0."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def run(args: argparse.Namespace) -> int:
    """Measure, print each case's rows when they are known, write ``bench.json`` and plots."""
    try:
        return _plot_stored(args) if args.stored is not None else _run(args)
    except BrokenPipeError:
        raise
    except OSError as error:  # contenders' own are in the results
        where, why = error.filename or args.out, error.strerror or error
        return _refuse(f"cannot read or write {where}: {why}; name another file or folder")


def _run(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    if args.plots is not None:
        # So that a folder or a package that is missing is told before hours of work.
        args.plots.mkdir(parents=True, exist_ok=True)
        importlib.import_module(_PLOTS)
    if args.device == "cuda" and not torch.cuda.is_available():
        return _refuse("--device cuda: expected a CUDA device, torch finds none; use --device cpu")
    torch.set_num_threads(args.threads)
    copy_rate = harness.copy_bandwidth(args.device)
    results = files.Results(_facts(args, copy_rate))
    _measure(args, results, copy_rate)
    results.write(args.out / "bench.json")
    for note in bench_lines.notes(results):
        _print(note)
    _print(f"wrote {args.out / 'bench.json'}")
    _draw_overview(results, args.out / "bench.png")
    if args.plots is not None:
        _plot([results], args.plots)
    if results.interrupted is not None:
        return 128 + signal.SIGINT
    return 1 if results.wrong or results.failed else 0


def _print(text: str) -> None:
    print(text, flush=True)  # a log shows it when it is known


def _refuse(why: str) -> int:
    print(f"bench: {why}", file=sys.stderr)
    return 2


def _draw_overview(results: Results, path: Path) -> None:
    """Draw one picture of everything, where matplotlib is installed: figures need no package."""
    if importlib.util.find_spec("matplotlib") is None:
        wanted = requirement("matplotlib")
        _print(f'{path}: not drawn: needs matplotlib: pip install "{wanted}"')
        return
    importlib.import_module(_PLOTS).write_overview(results.trusted, path)
    _print(f"wrote {path}")


def _plot_stored(args: argparse.Namespace) -> int:
    if args.plots is None:
        return _refuse("--from: expected --plots DIR beside it, got none; add --plots DIR")
    try:
        stored = [files.read(path) for path in args.stored]
    except ValueError as error:
        return _refuse(f"--from: {error}")
    args.plots.mkdir(parents=True, exist_ok=True)
    _plot(stored, args.plots)
    return 0


def _plot(measured: list[Results], folder: Path) -> None:
    rows = [row for results in measured for row in results.trusted]
    written = importlib.import_module(_PLOTS).write(rows, files.caption(measured), folder)
    _print(f"wrote {len(written)} plots into {folder}")


def _measure(args: argparse.Namespace, results: Results, copy_rate: float) -> None:
    """Run case after case; Ctrl-C ends the loop and keeps what was measured."""
    limit = (QUICK_LIMIT if args.quick else math.inf) if args.limit is None else args.limit
    end = time.monotonic() + limit
    seconds = args.seconds or (QUICK_SECONDS if args.quick else SECONDS)
    op, running = None, "the preparation"
    try:
        for case in _cases(args, results):
            running = f"{case.op} {case.setting}"
            if time.monotonic() > end:
                left = results.skipped if results.rows else results.failed
                left["the rest"] = f"not started: {limit:.0f} s were over"
                break
            if case.op != op:
                op = case.op
                _print(f"\n{op}: medians; speed-ups are those of fusedrl\n{bench_lines.heading()}")
            _print(case.setting)
            try:
                measured = harness.measure(case, seconds, args.device, copy_rate)
            except Exception as error:
                # The input or the truth raised; what a contender raises stands in its row.
                results.failed[running] = f"{type(error).__name__}: {error}"
                continue
            results.rows += measured
            for row in measured:
                right = harness.is_correct(row, measured)
                results.wrong += [] if right else [row]
                _print(bench_lines.line(row, not right))
            results.write(args.out / "bench.json")  # for a run that is killed later
    except KeyboardInterrupt:
        results.interrupted = running


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
    seen = set()
    for name in _ops(args, results):
        try:
            module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
            for case in harness.cases_of(module, args.device, args.quick, usable):
                if isinstance(case, harness.Skipped):
                    results.skipped[case.op] = case.why
                elif not args.quick or case.op not in seen:
                    seen.add(case.op)
                    yield case
        except Exception as error:
            results.failed[name] = f"{type(error).__name__}: {error}"


def _ops(args: argparse.Namespace, results: Results) -> list[str]:
    """Those asked for, or all of them; --quick leaves out what takes minutes."""
    if args.op or not args.quick:
        return args.op or OPS
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
