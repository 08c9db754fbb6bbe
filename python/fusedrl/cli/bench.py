"""``fusedrl bench``: benchmark every op against what it replaces, on this machine."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from fusedrl.benchmarks import harness, peers  # pyright: ignore[reportMissingImports]
from fusedrl.benchmarks import results as files  # pyright: ignore[reportMissingImports]
from fusedrl.cli import table
from fusedrl.cli.info import collect
from fusedrl.compat.requirements import requirement

FOLDER = Path(harness.__file__).resolve().parent
OPS = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
# --quick -> seconds for each contender, and the time after which no setting is started.
SECONDS = {False: (2.0, math.inf), True: (0.1, 100.0)}
PLOTS = "fusedrl.benchmarks.plots"  # imports matplotlib
NOT_QUICK = ("ranks", "grpo_step", "async_collector", "vllm")  # they start processes, or train

# The columns between the name of the contender and its status.
COLUMNS = {
    "ms": "{0.median_ms:.3f}",
    "speed-up": "{0.speedup:.2f}x",
    "rate": "{0.rate:.3g} {0.unit}",
    "of ceiling": "{0.fraction:.0%}",
    "max error": "{0.error:.1e}",
    "extra MiB": "{0.peak_extra_mib:.1f}",
}
LEGEND = """
speed-up: time of the contender / time of fusedrl, the median over interleaved repetitions
of ceiling: percentage of the rate of a plain copy ({:.1f} GB/s) or a plain matrix product; above
    100% if the data fits into a cache
extra MiB: peak memory above the inputs"""

EXAMPLES = """\
examples:
  fusedrl bench --quick                # one setting of most ops, in two minutes
  fusedrl bench --op token_kl          # all settings of one op
  fusedrl bench --op token_kl --plots plots                 # with plots
  fusedrl bench --plots plots --from bench-out/bench.json   # only plots

exit codes:
  0    all results of fusedrl are correct
  1    a result of fusedrl is wrong, or an op did not run
  2    invalid arguments, or a file cannot be written
  130  Ctrl-C; results until then are printed, stored and plotted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add = parser.add_argument
    add("--op", choices=OPS, action="append", metavar="OP", help=f"one of these: {', '.join(OPS)}")
    devices = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    add("--device", default="cpu", choices=devices, help="cuda if torch finds a GPU")
    add("--threads", type=whole_number, default=2, metavar="N", help="default: %(default)s")
    add("--seconds", type=positive, metavar="S", help="for each contender (2; quick: 0.1)")
    add("--limit", type=positive, metavar="S", help="start no setting after S seconds (quick: 100)")
    add(
        "--quick",
        action="store_true",
        help="one setting of each op that takes seconds, in two minutes",
    )
    add("--peers", action="store_true", help="also time Liger and cut-cross-entropy, if installed")
    add("--out", type=Path, default="bench-out", metavar="DIR", help="default: %(default)s")
    add("--plots", type=Path, metavar="DIR", help="also write SVG plots to DIR")
    add("--from", type=Path, nargs="+", metavar="FILE", dest="stored", help="only plot these files")


def positive(text: str) -> float:
    """A number above 0; argparse uses the name of this function in its error."""
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def whole_number(text: str) -> int:
    """An integer of at least 1."""
    return int(text if positive(text) else "")


def run(args: argparse.Namespace) -> int:
    """Measure, print each setting when it is done, and write ``bench.json`` and plots."""
    try:
        return _run(args)
    except OSError as error:  # errors of contenders are in the results
        if error.filename is None:
            raise
        why = f"cannot read or write {error.filename}: {error.strerror}"
        print(f"bench: {why}; name another file or folder", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    folder, status = args.plots or (args.stored and args.out), 0
    try:
        results = [files.read(path) for path in args.stored or ()]
    except ValueError as error:
        print(f"bench: --from: {error}", file=sys.stderr)
        return 2
    if folder is not None:  # fail before hours of measuring
        folder.mkdir(parents=True, exist_ok=True)
        importlib.import_module(PLOTS)
    if not results:
        results = [_measured(args)]
        status = _report(results[0], args.out)
    if folder is not None:
        rows = [row for each in results for row in each.trusted]
        written = importlib.import_module(PLOTS).write(rows, files.caption(results), folder)
        print(f"wrote {len(written)} plots into {folder}")
    return status


def _measured(args: argparse.Namespace) -> files.Results:
    """Measure all cases, and update ``bench.json`` after each; Ctrl-C ends the loop."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    copy_rate = harness.copy_bandwidth(args.device)
    found = files.Results(_facts(args, copy_rate))
    seconds, limit = SECONDS[args.quick]
    seconds, limit = args.seconds or seconds, args.limit or limit
    end = time.monotonic() + limit
    running = "the preparation"
    try:
        for case in _cases(args, found):
            running = f"{case.op} {case.setting}"
            if time.monotonic() > end:
                left = found.skipped if found.rows else found.failed
                left["remaining settings"] = f"not started: limit of {limit:.0f} s reached"
                break
            print(f"\n{case.op}, {case.setting}", flush=True)
            try:
                rows = harness.measure(case, seconds, args.device, copy_rate)
            except Exception as error:
                # Raised by the input or the ground truth; errors of contenders are in their rows.
                found.failed[running] = f"{type(error).__name__}: {error}"
                continue
            found.rows += rows
            found.write(args.out / "bench.json")  # in case the run is killed
            print(table(["contender", *COLUMNS, ""], *map(_cells, rows)))
    except KeyboardInterrupt:
        found.interrupted = running
    return found


def _cases(args: argparse.Namespace, found: files.Results) -> Iterator[harness.Case]:
    """The cases of the selected ops; an op that raises does not stop the run."""
    usable = set(peers.MODULES) - found.facts["absent"].keys()
    for name in args.op or OPS:
        if args.quick and not args.op and name in NOT_QUICK:
            found.skipped[name] = f"takes minutes: run it with --op {name}"
            continue
        try:
            module = importlib.import_module(f"fusedrl.benchmarks.bench_{name}")
            for case in harness.cases_of(module, args.device, args.quick, usable):
                if isinstance(case, harness.Skipped):
                    found.skipped[case.op] = case.why
                else:
                    yield case
        except Exception as error:
            found.failed[name] = f"{type(error).__name__}: {error}"


def _cells(row: harness.Row) -> list[str]:
    cells = [row.contender]
    for form in COLUMNS.values():
        try:
            cells.append(form.format(row))
        except TypeError:  # None: not measured
            cells.append("")
    return [*cells, "failed" if row.failed else "" if row.correct else "wrong"]


def _report(found: files.Results, out: Path) -> int:
    """Write the results, print the legend and what is missing; returns the exit code."""
    found.write(out / "bench.json")
    print(LEGEND.format(found.facts["ceilings"]["copy GB/s"]))
    of_rows = {f"{x.op} {x.setting}, {x.contender}": x.failed for x in found.rows if x.failed}
    notes = {"absent": found.facts["absent"], "skipped": found.skipped}
    for how, reasons in (notes | {"failed": found.failed | of_rows}).items():
        for name, why in reasons.items():
            print(f"{name}: {how}: {why}")
    print(f"wrote {out / 'bench.json'}")
    if importlib.util.find_spec("matplotlib") is None:
        print(f'bench.png: not drawn: needs matplotlib: pip install "{requirement("matplotlib")}"')
    else:
        importlib.import_module(PLOTS).write_overview(found.trusted, out / "bench.png")
        print(f"wrote {out / 'bench.png'}")
    if found.interrupted is not None:
        print(f"interrupted during {found.interrupted}, which is not in the results")
        return 130
    return 1 if found.failed or not all(row.correct for row in found.rows) else 0


def _facts(args: argparse.Namespace, copy_rate: float) -> dict[str, Any]:
    git = ["git", "-C", str(FOLDER), "describe", "--always", "--dirty"]
    found = shutil.which("git") and subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "machine": collect(),
        # Of the checkout with the benchmarks, if there is one.
        "commit": found.stdout.strip() or None if found else None,
        "threads": args.threads,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "ceilings": {"copy GB/s": copy_rate / 1e9, "definition": harness.COPY_DEFINITION},
        "absent": peers.absent(args.device, args.peers),
    }
