"""``fusedrl demo``: the scoring job on bundled chats, with two tiny models that it makes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fusedrl.cli.score import score_and_print
from fusedrl.demo import CHATS, make_models
from fusedrl.scoring import Settings
from fusedrl.scoring.errors import printable, reason

EXAMPLES = """\
examples:
  fusedrl demo                    # then open demo-out/report.html in a browser
  fusedrl demo --out elsewhere    # into another folder

exit codes:
  0    all 50 chats are scored
  2    the folder cannot be written, or the models were refused
  130  Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("demo-out"),
        metavar="DIR",
        help="folder of the models, the tables and the report (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Train the two models into ``out/models`` and score the bundled chats; 2 if out is refused."""
    disable_progress_bar()
    policy, reference = args.out / "models" / "policy", args.out / "models" / "reference"
    into = printable(str(policy.parent))
    print(f"training two tiny models into {into} (about half a minute) ...", flush=True)
    try:
        for folder in (policy, reference):
            folder.mkdir(parents=True, exist_ok=True)
        make_models(policy, reference)
    except Exception as error:
        # The Rust libraries behind tokenizers and weights have error types of their own.
        if not isinstance(error, OSError) and "(os error" not in str(error):
            raise
        where = printable(str(args.out))
        print(f"demo: out: cannot write {where}: {reason(error)}", file=sys.stderr)
        return 2
    return score_and_print(CHATS, str(policy), str(reference), args.out, Settings())
