"""``fusedrl demo``: the scoring job on bundled chats and models made on the spot."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from fusedrl.cli.score import score_and_print
from fusedrl.demo import CHATS, make_models
from fusedrl.scoring import Settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    """Train the two models into ``out/models`` and score the bundled chats."""
    disable_progress_bar()
    policy, reference = args.out / "models" / "policy", args.out / "models" / "reference"
    print(f"training two tiny models into {args.out / 'models'} (some seconds) ...", flush=True)
    make_models(policy, reference)
    return score_and_print(CHATS, str(policy), str(reference), args.out, Settings())
