"""``fusedrl score``: chats and two models in, two tables and a heat map out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from tqdm import tqdm

from fusedrl.cli.console import Console
from fusedrl.scoring import ChatError, ScoreError, Settings
from fusedrl.scoring.chats import survey
from fusedrl.scoring.errors import printable
from fusedrl.scoring.records import read_records
from fusedrl.scoring.settings import DTYPES, ESTIMATORS

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
  # an estimate for answers that the policy sampled; an end at the first chat that cannot be scored
  fusedrl score chats.jsonl --policy demo-out/models/policy \\
    --reference demo-out/models/reference --out drift --estimator k1 --strict

exit codes:
  0    every chat is scored
  1    the files are written, and some chats are not in them
  2    the input is refused, and nothing is written; one line says why
  130  Ctrl-C
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; what :class:`Settings` has is its default."""
    add = parser.add_argument
    add(
        "chats",
        nargs="+",
        help="files of JSON lines, a JSON array, Parquet or CSV, also with gzip; - for standard "
        "input; rows with messages, conversations, prompt and completion, instruction and output, "
        "or chosen and rejected",
    )
    model = {"required": True, "metavar": "MODEL"}
    add(
        "--policy",
        **model,
        help="the policy: a folder, a name on the hub, or a folder of peft adapters",
    )
    add("--reference", **model, help="the same of the reference")
    add(
        "--base",
        metavar="MODEL",
        help="the model under the adapters (default: the one that their configuration names)",
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder for the three files")
    add(
        "--estimator",
        choices=ESTIMATORS,
        help="estimate the KL from each token's log-probs alone, for answers that the policy "
        "sampled (default: the exact KL of the two distributions, for any text)",
    )
    add(
        "--forward-kl",
        action="store_true",
        help="also compute the exact KL of the reference from the policy",
    )
    add(
        "--temperature",
        type=float,
        metavar="T",
        help="divide the logits of both models by this number (default: %(default)g)",
    )
    add(
        "--device",
        help="where the models run, as torch names it (default: cuda if there is a GPU, else cpu)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="dtype of the models (default: float32 on the CPU, the checkpoint's on a GPU)",
    )
    add(
        "--max-tokens-per-batch",
        type=int,
        metavar="N",
        help="the most tokens of one forward pass (default: 512 on the CPU, more on a GPU)",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a Jinja chat template to use instead of the tokenizer's",
    )
    add(
        "--chat-template-kwargs",
        type=_object,
        metavar="JSON",
        help="variables of the chat template, as in '{\"enable_thinking\": false}'",
    )
    add(
        "--context",
        type=int,
        metavar="N",
        help="the most tokens of a chat (default: the models' max_position_embeddings)",
    )
    add("--limit", type=int, metavar="N", help="score the first N rows of the input")
    add(
        "--report-chats",
        type=int,
        metavar="N",
        help="how many chats report.html shows, the most drifted first (default: %(default)s)",
    )
    add(
        "--rollout-bound",
        type=float,
        metavar="X",
        help="truncate the probability ratio of policy and engine at X, for chats with "
        "rollout_log_probs (default: %(default)g)",
    )
    add(
        "--strict",
        action="store_true",
        help="stop at the first chat that cannot be scored, instead of leaving it out",
    )
    add("--json", action="store_true", help="print the summary as one line of JSON, for a script")
    parser.set_defaults(**vars(Settings()))


def _object(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"expected an object of JSON, got {text!r}")


def run(args: argparse.Namespace) -> int:
    """Score, with progress on stderr and the summary on stdout; returns the exit code."""
    options = {name: getattr(args, name) for name in Settings.__dataclass_fields__}
    models = args.policy, args.reference
    return score_and_print(args.chats, *models, args.out, options, as_json=args.json)


def score_and_print(
    chats: str | Path | Sequence[str],
    policy: str,
    reference: str,
    out: Path,
    options: dict[str, Any],
    *,
    as_json: bool = False,
) -> int:
    """Run the job as the command does; ``options`` are those of :class:`Settings`.

    Returns:
        The exit code: 0, 1 if chats were left out, 2 if the input is refused.
    """
    try:
        settings = Settings(**options)
        # Before the imports, which take seconds.
        records = read_records(chats, settings.limit)
        found = survey(records)
        print(f"{records.name}: {found.format}", file=sys.stderr)
        from transformers.utils.logging import disable_progress_bar

        from fusedrl.scoring.job import score_chats

        disable_progress_bar()  # that of transformers, which would break up ours
        # In a log, where each state of the bar stays, one in half a minute is enough.
        interval = 0.1 if sys.stderr.isatty() else 30
        with tqdm(desc="scoring", total=found.chats, unit="chat", mininterval=interval) as bar:

            def on_skip(error: ChatError) -> None:
                bar.write(f"{error}; skipped", file=sys.stderr)

            summary = score_chats(
                records, policy, reference, out, settings, on_skip=on_skip, on_progress=bar.update
            )
    except ScoreError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    if as_json:
        from fusedrl.scoring.report import plain

        print(json.dumps(plain(summary.figures(), digits=17)))
    else:
        _print_summary(summary, out, settings)
    return 1 if summary.skipped else 0


def _print_summary(summary: Summary, out: Path, settings: Settings) -> None:
    from fusedrl.scoring.report import common_folder, drift

    console, figures = Console(), summary.figures()
    several, folder = len({row["file"] for row in summary.rows}) > 1, common_folder(summary.rows)
    table = Table(title="most-drifted chats", title_justify="left")
    for heading in ("chat (line)", "scored tokens", "total KL", "mean KL", "mean entropy"):
        table.add_column(heading, justify="right")
    for row in sorted(summary.rows, key=drift, reverse=True)[:10]:
        file = f"{row['file'].removeprefix(folder)}:" if several else ""
        table.add_row(
            f"{file}{row['chat']} {row['answer'] or ''}".rstrip(),
            str(row["scored_tokens"]),
            f"{row['kl_total']:.3f}",
            f"{row['kl_mean']:.4f}",
            f"{row['entropy_mean']:.3f}",
        )
    console.print(table)
    left_out = " (left out, see above)" if summary.skipped else ""
    for line in (
        f"{_count(figures['chats'], 'chat')} scored, {figures['skipped']} skipped{left_out}, "
        f"{_count(figures['tokens'], 'token')}",
        _means(figures, settings),
        *_answer_lines(figures),
        *_mismatch_line(figures, settings.rollout_bound),
        *_report_line(summary, settings),
        f"{out / 'report.html'}, {out / 'chats.parquet'}, {out / 'tokens.parquet'}",
    ):
        # A terminal may not know every character of a path.
        shown = printable(line).encode(console.encoding, "backslashreplace")
        print(shown.decode(console.encoding))


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _means(figures: dict[str, Any], settings: Settings) -> str:
    said = f"mean KL {figures['kl_mean']:.4f} nats a token"
    if settings.estimator:
        said += f" ({settings.estimator}, an estimate for tokens that the policy sampled)"
    if settings.forward_kl:
        said += f", of the reference from the policy {figures['kl_forward_mean']:.4f}"
    entropies = figures["entropy_mean"], figures["reference_entropy_mean"]
    return f"{said}, mean entropy {entropies[0]:.3f} nats (reference {entropies[1]:.3f})"


def _answer_lines(figures: dict[str, Any]) -> Iterator[str]:
    for answer in ("chosen", "rejected"):
        if own := figures.get(answer):
            yield f"{answer}: {_count(own['chats'], 'chat')}, mean KL {own['kl_mean']:.4f}"


def _report_line(summary: Summary, settings: Settings) -> Iterator[str]:
    from fusedrl.scoring.report import MAX_TOKENS

    asked = min(settings.report_chats, len(summary.rows))
    if summary.shown < asked:
        yield (
            f"report.html shows {summary.shown} of {_count(asked, 'chat')}: a page has at most "
            f"{MAX_TOKENS} tokens"
        )


def _mismatch_line(figures: dict[str, Any], bound: float) -> Iterator[str]:
    if total := figures.get("rollout"):
        yield (
            f"{_count(total['chats'], 'chat')} with rollout log-probs: k1 {total['k1']:.4f}, k3 "
            f"{total['k3']:.4f} nats a token, effective {total['ess']:.1f} of "
            f"{total['tokens']} tokens, largest ratio {total['max_ratio']:.4g}, "
            f"{total['clipped']:.2%} above {bound:g}"
        )
