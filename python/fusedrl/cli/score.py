"""``fusedrl score``: chats and two models in, two tables and a heat map out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fusedrl.cli import alive, numbers
from fusedrl.cli.console import Console
from fusedrl.scoring import ChatError, ScoreError, Settings
from fusedrl.scoring.errors import printable
from fusedrl.scoring.inputs import check_inputs
from fusedrl.scoring.records import Source, opened
from fusedrl.scoring.settings import DTYPES, ESTIMATORS, TEMPERATURES

if TYPE_CHECKING:
    from fusedrl.scoring import Summary

EXAMPLES = """\
examples:
  # two tiny models, where you have none of your own
  fusedrl demo
  # a chat for each line of a file
  printf '%s%s\\n' '{"messages": [{"role": "user", "content": "2 + 2?"}, ' \\
    '{"role": "assistant", "content": "4"}]}' > chats.jsonl
  # drift/report.html, drift/chats.parquet and drift/tokens.parquet
  fusedrl score chats.jsonl --policy demo-out/models/policy \\
    --reference demo-out/models/reference --out drift
  # another estimator, and an end at the first chat that cannot be scored
  fusedrl score chats.jsonl --policy demo-out/models/policy \\
    --reference demo-out/models/reference --out drift --estimator k1 --strict

exit codes:
  0    every chat is scored
  1    the files are written, and some chats are not in them
  2    the input is refused, and nothing is written; one line says why
  130  Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    defaults = Settings()
    parser.add_argument(
        "chats",
        help="a file of JSON lines, a JSON array or Parquet, - for standard input; rows with "
        "messages, prompt and completion, conversations, or chosen and rejected",
    )
    model = {"required": True, "metavar": "MODEL"}
    parser.add_argument("--policy", **model, help="folder of the policy, or its name on the hub")
    parser.add_argument("--reference", **model, help="the same of the reference")
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="folder for the three files"
    )
    parser.add_argument(
        "--estimator",
        choices=ESTIMATORS,
        default=defaults.estimator,
        help="KL estimator of the column 'kl' and of the report (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=defaults.temperature,
        metavar="T",
        help="divide the logits of both models by this number (default: %(default)g)",
    )
    parser.add_argument(
        "--device",
        default=defaults.device,
        help="where the models run, as torch names it (default: cuda if there is a GPU, else cpu)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=defaults.dtype,
        help="dtype of the models (default: float32 on the CPU, the checkpoint's on a GPU)",
    )
    parser.add_argument(
        "--max-tokens-per-batch",
        type=numbers.count,
        default=defaults.max_tokens_per_batch,
        metavar="N",
        help="the most tokens of one forward pass (default: 512 on the CPU, more on a GPU)",
    )
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja chat template to use instead of the tokenizer's",
    )
    parser.add_argument(
        "--context",
        type=numbers.count,
        default=defaults.context,
        metavar="N",
        help="the most tokens of a chat (default: the models' max_position_embeddings)",
    )
    parser.add_argument(
        "--report-chats",
        type=numbers.count,
        default=defaults.report_chats,
        metavar="N",
        help="how many chats report.html shows, the most drifted first (default: %(default)s)",
    )
    parser.add_argument(
        "--rollout-bound",
        type=_bound,
        default=defaults.rollout_bound,
        metavar="X",
        help="truncate the probability ratio of policy and engine at X, for chats with "
        "rollout_log_probs (default: %(default)g)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop at the first chat that cannot be scored, instead of leaving it out",
    )


def _temperature(text: str) -> float:
    low, high = TEMPERATURES
    with suppress(ValueError):
        if low <= float(text) <= high:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number from {low:g} to {high:g}, got {text!r}")


def _bound(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) <= TEMPERATURES[1]:
            return float(text)
    raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")


def run(args: argparse.Namespace) -> int:
    """Score, with progress on stderr and the summary on stdout; returns the exit code."""
    settings = Settings(
        **{name: getattr(args, name) for name in Settings.__dataclass_fields__ if name in args}
    )
    return score_and_print(args.chats, args.policy, args.reference, args.out, settings)


def score_and_print(
    chats: str | Path, policy: str, reference: str, out: Path, settings: Settings
) -> int:
    """Run the job as the command does.

    Returns:
        The exit code: 0, 1 if chats were left out, 2 if the input is refused.
    """
    try:
        with opened(chats) as source:
            # Before the imports, which take seconds.
            found = check_inputs(source, policy, reference, settings.chat_template)
            errors = Console(stderr=True)
            line = printable(f"{source.name}: {found.format}")
            errors.print(line, markup=False, highlight=False, soft_wrap=True)
            summary = _score(source, policy, reference, out, settings, found.chats, errors)
    except ScoreError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    _print_summary(summary, out, settings)
    return 1 if summary.skipped else 0


def _score(
    chats: Source,
    policy: str,
    reference: str,
    out: Path,
    settings: Settings,
    expected: int,
    errors: Console,
) -> Summary:
    """Run the job with a progress bar, or with a line from time to time where no one sees one."""
    from transformers.utils.logging import disable_progress_bar

    from fusedrl.scoring.job import score_chats

    disable_progress_bar()  # that of transformers, which would break up ours

    def on_skip(error: ChatError) -> None:
        errors.print(f"{error}; skipped", markup=False, highlight=False, soft_wrap=True)

    with _progress(errors) as progress:
        task = progress.add_task("scoring", total=expected)

        def doing() -> str:
            done = progress.tasks[0].completed
            return f"{done:.0f} of {expected} chats" if done else "loading the models"

        with alive.told("score", doing, terminal=errors.is_terminal):
            return score_chats(
                chats,
                policy,
                reference,
                out,
                settings,
                on_skip=on_skip,
                on_progress=lambda done: progress.advance(task, done),
            )


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = console.is_terminal
    progress = Progress(*columns, console=console, transient=True, disable=not shown)
    progress.start()
    try:
        yield progress
    finally:
        with suppress(OSError):  # a terminal that hung up takes no more text
            progress.stop()


def _print_summary(summary: Summary, out: Path, settings: Settings) -> None:
    from fusedrl.scoring.report import drift

    console = Console()
    table = Table(title="most-drifted chats", title_justify="left")
    for heading in ("chat (line)", "scored tokens", "total KL", "mean KL", "mean entropy"):
        table.add_column(heading, justify="right")
    for row in sorted(summary.rows, key=drift, reverse=True)[:10]:
        table.add_row(
            f"{row['chat']} {row['answer'] or ''}".rstrip(),
            str(row["scored_tokens"]),
            f"{row['kl_total']:.3f}",
            f"{row['kl_mean']:.4f}",
            f"{row['entropy_mean']:.3f}",
        )
    console.print(table)
    tokens = sum(row["scored_tokens"] for row in summary.rows)
    left_out = " (left out, see above)" if summary.skipped else ""
    for line in (
        f"{_count(len(summary.rows), 'chat')} scored, {len(summary.skipped)} skipped{left_out}, "
        f"{_count(tokens, 'token')}",
        f"mean KL {summary.mean('kl_mean'):.4f} nats a token ({settings.estimator}; "
        f"k1 {summary.mean('kl_k1_mean'):.4f}, k3 {summary.mean('kl_k3_mean'):.4f}), "
        f"mean entropy {summary.mean('entropy_mean'):.3f} nats",
        *_answer_lines(summary),
        *_mismatch_line(summary, settings.rollout_bound),
        *_report_lines(summary, settings, out),
        f"{out / 'report.html'}, {out / 'chats.parquet'}, {out / 'tokens.parquet'}",
    ):
        # A terminal may not know every character of a path.
        shown = printable(line).encode(console.encoding, "backslashreplace")
        text = shown.decode(console.encoding)
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _answer_lines(summary: Summary) -> Iterator[str]:
    for answer in ("chosen", "rejected"):
        own = replace(summary, rows=[row for row in summary.rows if row["answer"] == answer])
        if own.rows:
            yield f"{answer}: {_count(len(own.rows), 'chat')}, mean KL {own.mean('kl_mean'):.4f}"


def _report_lines(summary: Summary, settings: Settings, out: Path) -> Iterator[str]:
    from fusedrl.scoring.report import MAX_TOKENS

    asked = min(settings.report_chats, len(summary.rows))
    if summary.shown < asked:
        yield (
            f"report.html shows {summary.shown} of {_count(asked, 'chat')}: a page has at most "
            f"{MAX_TOKENS} tokens"
        )
    if summary.replaced:
        yield f"replaced {', '.join(summary.replaced)} of an earlier job in {out}"


def _mismatch_line(summary: Summary, bound: float) -> Iterator[str]:
    from fusedrl.scoring.tables import mismatch_row

    if summary.mismatch is None:
        return
    total = mismatch_row(summary.mismatch)
    chats = sum(row["rollout_tokens"] is not None for row in summary.rows)
    yield (
        f"{_count(chats, 'chat')} with rollout log-probs: k1 {total['k1']:.4f}, k3 "
        f"{total['k3']:.4f} nats a token, effective {total['ess']:.1f} of "
        f"{total['tokens']} tokens, largest ratio {total['max_ratio']:.4g}, "
        f"{total['clipped']:.2%} above {bound:g}"
    )
