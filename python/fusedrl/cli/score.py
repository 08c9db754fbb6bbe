"""``fusedrl score``: score chats under two models, and write two tables and a heat map."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import rich.console
from rich.table import Table
from tqdm import tqdm

from fusedrl.scoring import ChatError, ScoreError, Settings
from fusedrl.scoring.chats import survey
from fusedrl.scoring.errors import printable
from fusedrl.scoring.messages import brief
from fusedrl.scoring.output import FILES
from fusedrl.scoring.records import parsed, read_records
from fusedrl.scoring.settings import DTYPES, ESTIMATORS

SKIPPED_SHOWN = 20

EXAMPLES = """\
examples:
  # make two tiny models
  fusedrl demo
  # a file with one chat for each line
  printf '%s%s\\n' '{"messages": [{"role": "user", "content": "2 + 2?"}, ' \\
    '{"role": "assistant", "content": "4"}]}' > chats.jsonl
  # drift/report.html, drift/chats.parquet and drift/tokens.parquet
  fusedrl score chats.jsonl --policy demo-out/models/policy \\
    --reference demo-out/models/reference --out drift
  # estimate the KL, for answers sampled from the policy; stop at the first invalid chat
  fusedrl score chats.jsonl --policy demo-out/models/policy \\
    --reference demo-out/models/reference --out drift --estimator k1 --strict

exit codes:
  0    all chats are scored
  1    the files are written, without the chats that were skipped
  2    invalid input: nothing is written, and stderr has the reason
  130  Ctrl-C
"""


def _object(text: str) -> dict[str, Any]:
    """Parse the variables of a chat template."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := parsed(text), dict):
            return found
    raise argparse.ArgumentTypeError(f"expected a JSON object, got {brief(text)}")


_FLAG: dict[str, Any] = {"action": "store_true"}
_COUNT: dict[str, Any] = {"type": int, "metavar": "N"}
_NUMBER: dict[str, Any] = {"type": float, "metavar": "X"}
# Field of Settings -> its help, and the arguments of add_argument.
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "base": (
        "the base model of adapters (default: the one in their configuration)",
        {"metavar": "MODEL"},
    ),
    "estimator": (
        "estimate the KL from the log-probs of each token, for answers sampled from the policy "
        "(default: the exact KL of the two distributions, for any text)",
        {"choices": ESTIMATORS},
    ),
    "forward_kl": ("also compute the exact forward KL, KL(reference || policy)", _FLAG),
    "temperature": ("divide the logits of both models by X (default: %(default)g)", _NUMBER),
    "device": ("torch device of the models (default: a GPU if there is one, or else the CPU)", {}),
    "dtype": (
        "dtype of the models (default: float32 on the CPU, that of the checkpoint on a GPU)",
        {"choices": DTYPES},
    ),
    "max_tokens_per_batch": (
        "maximum tokens of a forward pass, with padding (default: 512 on the CPU, more on a GPU)",
        _COUNT,
    ),
    "chat_template": (
        "a Jinja chat template that replaces the tokenizer's",
        {"type": Path, "metavar": "FILE"},
    ),
    "chat_template_kwargs": (
        "variables of the chat template, such as '{\"enable_thinking\": false}'",
        {"type": _object, "metavar": "JSON"},
    ),
    "context": ("maximum tokens of a chat (default: the models' max_position_embeddings)", _COUNT),
    "limit": ("score the first N rows of the input", _COUNT),
    "report_chats": (
        "number of chats in report.html, largest drift first (default: %(default)s)",
        _COUNT,
    ),
    "rollout_bound": (
        "truncate the probability ratio of policy and engine at X, for chats with "
        "rollout_log_probs (default: %(default)g)",
        _NUMBER,
    ),
    "strict": ("stop at the first chat that cannot be scored, instead of skipping it", _FLAG),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; :class:`Settings` has the defaults."""
    add = parser.add_argument
    add(
        "chats",
        nargs="+",
        help="JSON lines, JSON arrays, Parquet or CSV, also gzipped; - for standard input; rows "
        "with messages, conversations, prompt and completion, instruction and output, or chosen "
        "and rejected",
    )
    model = {"required": True, "metavar": "MODEL"}
    add(
        "--policy",
        **model,
        help="the policy: a directory, a name on the hub, or a directory of peft adapters",
    )
    add("--reference", **model, help="the reference, likewise")
    add("--out", required=True, type=Path, metavar="DIR", help="directory for the three files")
    for name, (text, reading) in OPTIONS.items():
        add(f"--{name.replace('_', '-')}", help=text, **reading)
    add("--json", action="store_true", help="print the summary as one line of JSON")
    parser.set_defaults(**vars(Settings()))


def run(args: argparse.Namespace) -> int:
    """Score with progress on stderr and the summary on stdout; returns the exit code."""
    try:
        settings = Settings(**{name: getattr(args, name) for name in OPTIONS})
        # Before the imports, which take seconds.
        records = read_records(args.chats, settings.limit)
        found = survey(records)
        print(f"{records.name}: {found.format}", file=sys.stderr)
        from transformers.utils.logging import disable_progress_bar

        from fusedrl.scoring.job import score_chats
        from fusedrl.scoring.report import plain

        disable_progress_bar()  # of transformers, which would interleave with this one
        # Each update is a line if stderr is a file: update every half minute.
        interval, skipped = 0.1 if sys.stderr.isatty() else 30, count(1)
        with tqdm(desc="scoring", total=found.chats, unit="chat", mininterval=interval) as bar:

            def on_skip(error: ChatError) -> None:
                if (number := next(skipped)) <= SKIPPED_SHOWN:
                    bar.write(f"{error}; skipped", file=sys.stderr)
                elif number == SKIPPED_SHOWN + 1:
                    bar.write("further skipped chats are not listed", file=sys.stderr)

            summary = score_chats(
                *(records, args.policy, args.reference, args.out, settings),
                on_skip=on_skip,
                on_progress=bar.update,
            )
    except ScoreError as error:
        print(f"score: {error}", file=sys.stderr)
        return 2
    figures, status = summary.figures(), 1 if summary.skipped else 0
    if args.json:
        print(json.dumps(plain(figures, digits=17)))
        return status
    console = Console(markup=False, emoji=False)  # names of files may look like either
    console.print(_most_drifted(summary.rows))
    written = ", ".join(str(args.out / name) for name in reversed(FILES))
    for line in (*_lines(figures, settings), written):
        # The encoding of a terminal may lack characters of a path.
        shown = printable(line).encode(console.encoding, "backslashreplace")
        print(shown.decode(console.encoding))
    return status


def _most_drifted(rows: Sequence[dict[str, Any]]) -> Table:
    from fusedrl.scoring.report import common_folder, drift

    several, folder = len({row["file"] for row in rows}) > 1, common_folder(rows)
    table = Table(title="most-drifted chats", title_justify="left")
    for heading in ("chat (line)", "scored tokens", "total KL", "mean KL", "mean entropy"):
        table.add_column(heading, justify="right")
    for row in sorted(rows, key=drift, reverse=True)[:10]:
        file = f"{row['file'].removeprefix(folder)}:" if several else ""
        table.add_row(
            f"{file}{row['chat']} {row['answer'] or ''}".rstrip(),
            str(row["scored_tokens"]),
            f"{row['kl_total']:.3f}",
            f"{row['kl_mean']:.4f}",
            f"{row['entropy_mean']:.3f}",
        )
    return table


def _lines(figures: dict[str, Any], settings: Settings) -> Iterator[str]:
    """The lines of the summary."""
    skipped = f"{figures['skipped']} skipped"
    skipped += " (reasons in report.html)" if figures["skipped"] else ""
    scored = _count(figures["chats"], "chat"), _count(figures["tokens"], "token")
    yield f"{scored[0]} scored, {skipped}, {scored[1]}"
    for what, chats in figures.get("not_rendered", {}).items():
        yield f"{_count(chats, 'chat')} with {what} that the chat template does not render"
    mean = f"mean KL {figures['kl_mean']:.4f} nats per token"
    if settings.estimator:
        mean += f" ({settings.estimator}, an estimate for tokens sampled from the policy)"
    if settings.forward_kl:
        mean += f", forward KL {figures['kl_forward_mean']:.4f}"
    entropies = figures["entropy_mean"], figures["reference_entropy_mean"]
    yield f"{mean}, mean entropy {entropies[0]:.3f} nats (reference {entropies[1]:.3f})"
    for answer in ("chosen", "rejected"):
        if means := figures.get(answer):
            yield f"{answer}: {_count(means['chats'], 'chat')}, mean KL {means['kl_mean']:.4f}"
    if total := figures.get("rollout"):
        yield (
            f"{_count(total['chats'], 'chat')} with rollout log-probs: k1 {total['k1']:.4f}, k3 "
            f"{total['k3']:.4f} nats per token, effective sample size {total['ess']:.1f} of "
            f"{total['tokens']} tokens, largest ratio {total['max_ratio']:.4g}, "
            f"{total['clipped']:.2%} above {settings.rollout_bound:g}"
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


class Console(rich.console.Console):
    """A rich console that leaves broken pipes to :func:`fusedrl.cli.main`."""

    def on_broken_pipe(self) -> None:
        """Re-raise the error, where rich would exit with 1."""
        raise  # called in an except block for BrokenPipeError
