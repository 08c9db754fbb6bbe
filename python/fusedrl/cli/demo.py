"""``fusedrl demo``: train a tiny policy with ``examples/grpo.py``, then score its drift."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fusedrl.cli import main
from fusedrl.demo import dialogs, make_reference
from fusedrl.demo.models import one_thread
from fusedrl.demo.report import add_training, parts_of
from fusedrl.examples.grpo import train  # pyright: ignore[reportMissingImports]
from fusedrl.scoring.errors import printable, reason

# The last batches, with answers of the trained policy.
BATCHES_SCORED = 6

EXAMPLES = """\
examples:
  fusedrl demo                    # then open demo-out/report.html in a browser
  fusedrl demo --out elsewhere    # in another directory

exit codes:
  0    all answers are scored
  1    an answer was skipped
  2    the directory cannot be written, or the models cannot be scored
  130  Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="directory for the models, tables and report (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Train two models in ``out/models`` and score the last answers; returns the exit code."""
    disable_progress_bar()
    warnings.filterwarnings("ignore", module="torch|tensordict")  # not caused by the user
    policy, reference = args.out / "models" / "policy", args.out / "models" / "reference"
    print(f"making a reference in {printable(str(reference))} ...", flush=True)
    clock = [time.perf_counter()]
    try:
        for folder in (policy, reference):
            folder.mkdir(parents=True, exist_ok=True)
        make_reference(reference)
        clock.append(time.perf_counter())
        print("training a policy to answer in digits, with rollouts in a worker ...", flush=True)
        with one_thread():  # the worker uses the other cores
            batches = train(reference, policy)
        answers = args.out / "answers.jsonl"
        dialogs.write_answers(answers, batches[-BATCHES_SCORED:])
    except Exception as error:
        # The Rust libraries behind tokenizers and weights have error types of their own, and take
        # no path that is not UTF-8. A pipe breaks where nobody reads what is printed.
        is_of_folder = isinstance(error, OSError | UnicodeEncodeError) or "(os error" in str(error)
        if isinstance(error, BrokenPipeError) or not is_of_folder:
            raise
        where = printable(str(args.out))
        print(f"demo: out: cannot write {where}: {reason(error)}", file=sys.stderr)
        return 2
    clock.append(time.perf_counter())
    models = f"--policy={policy}", f"--reference={reference}"
    code = main(["score", *models, f"--out={args.out}", "--", str(answers)])
    if code == 0:
        seconds = {"making the reference": clock[1] - clock[0], **parts_of(batches)}
        seconds["scoring"] = time.perf_counter() - clock[2]
        add_training(args.out / "report.html", batches, seconds)
    return code
