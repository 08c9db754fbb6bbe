"""The scoring job: read chats, run two models, write two tables and a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch

import fusedrl
from fusedrl.ops import Mismatch
from fusedrl.scoring.batch_scores import ScoredChat, score_batch
from fusedrl.scoring.chats import nothing_to_score, parse_chats, survey
from fusedrl.scoring.errors import ChatError, printable, reason
from fusedrl.scoring.output import whole_files
from fusedrl.scoring.pretrained import ModelPair, load_pair, read_template
from fusedrl.scoring.records import Records, read_records
from fusedrl.scoring.report import HtmlReport
from fusedrl.scoring.settings import Settings
from fusedrl.scoring.tables import Tables, mismatch_row
from fusedrl.scoring.tokenization import TokenizedChat, tokenize_chat

# Number of chats scored in one call, which share forward passes.
BATCH = 32


@dataclass
class Summary:
    """The results of a job: the rows of ``chats.parquet``, and the skipped chats.

    ``mismatch`` is over all tokens with a rollout log-prob, ``None`` if there are none.
    ``not_rendered`` counts the chats whose ``"tools"`` or, for example, ``"system messages"`` the
    chat template does not render.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[ChatError] = field(default_factory=list)
    mismatch: Mismatch | None = None
    not_rendered: Counter[str] = field(default_factory=Counter)

    def mean(self, column: str, rows: Sequence[dict[str, Any]] | None = None) -> float:
        """Mean of a column such as ``kl_mean`` over the scored tokens of ``rows`` or all chats."""
        rows = self.rows if rows is None else rows
        weights = [row["scored_tokens"] for row in rows]
        return float(numpy.average([row[column] for row in rows], weights=weights))

    def figures(self) -> dict[str, Any]:
        """The summary statistics by name, as ``fusedrl score --json`` prints them."""
        means = ("kl_mean", "kl_forward_mean", "entropy_mean", "reference_entropy_mean")
        figures = {
            "chats": len(self.rows),
            "skipped": len(self.skipped),
            "tokens": sum(row["scored_tokens"] for row in self.rows),
            **{name: self.mean(name) for name in means if self.rows[0][name] is not None},
        }
        for answer in ("chosen", "rejected"):
            if rows := [row for row in self.rows if row["answer"] == answer]:
                figures[answer] = {"chats": len(rows), "kl_mean": self.mean("kl_mean", rows)}
        if self.not_rendered:
            figures["not_rendered"] = dict(sorted(self.not_rendered.items()))
        if self.mismatch is not None:
            chats = sum(bool(row["rollout_tokens"]) for row in self.rows)
            figures["rollout"] = {"chats": chats, **mismatch_row(self.mismatch)}
        return figures


def score_chats(
    chats: str | Path | Sequence[str | Path] | Records,
    policy: str,
    reference: str,
    out: str | Path,
    settings: Settings | None = None,
    *,
    on_skip: Callable[[ChatError], None] = lambda error: None,
    on_progress: Callable[[], object] = lambda: None,
) -> Summary:
    """Score conversations under two models.

    Writes ``tokens.parquet``, ``chats.parquet`` and ``report.html`` into ``out``. The files are
    written to a temporary directory in it and moved when all three are complete: a failed or
    interrupted job does not change the files of an earlier job. A killed job leaves the temporary
    directory behind.

    Args:
        chats: paths or glob patterns of JSON lines, JSON arrays, Parquet or CSV, also gzipped;
            ``"-"`` for standard input. Rows are ``{"messages": [{"role", "content"}, ...]}``,
            ``{"prompt", "completion"}``, ShareGPT, Alpaca, or preference pairs. An optional
            ``"rollout_log_probs"`` has the engine's log-prob of each scored token or each token.
        policy: directory or hub name of the trained model, or a directory of peft adapters.
        reference: directory or hub name of the reference model.
        out: output directory, created if necessary.
        settings: options; ``None`` for the defaults.
        on_skip: called with the error of each skipped chat.
        on_progress: called after each chat, scored or skipped.

    Raises:
        ScoreError: a model or file does not load, vocabularies differ, or no chat can be scored.
        ChatError: with ``settings.strict``, a chat cannot be scored.

    Example:
        >>> from fusedrl.scoring import score_chats
        >>> summary = score_chats("chats.jsonl", "policy", "reference", "out")  # doctest: +SKIP
        >>> summary.mean("kl_mean")  # doctest: +SKIP
        0.031
    """
    settings, out = settings or Settings(), Path(out)
    records = chats if isinstance(chats, Records) else read_records(chats, settings.limit)
    facts = {
        "chats": records.name,
        "format": survey(records).format,
        "policy": printable(str(policy)),
        "reference": printable(str(reference)),
        "kl": settings.estimator or "exact",
        "temperature": f"{settings.temperature:g}",
    }
    chosen = {name: getattr(settings, name) for name in ("base", "chat_template", "limit")}
    chosen |= {f"template's {name}": x for name, x in settings.chat_template_kwargs.items()}
    facts |= {name: printable(str(value)) for name, value in chosen.items() if value is not None}
    template = read_template(settings.chat_template)
    inputs = [*records.paths, *([settings.chat_template] if settings.chat_template else [])]
    summary = Summary()

    def skip(error: ChatError) -> None:
        if settings.strict:
            raise error
        summary.skipped.append(error)
        on_skip(error)
        on_progress()

    with whole_files(out, inputs) as folder:
        how = settings.device, settings.dtype, template, settings.base
        models = load_pair(policy, reference, *how)
        facts["dtype"] = str(models.policy.dtype).removeprefix("torch.")
        facts |= {"device": str(models.device), "fusedrl": fusedrl.__version__}
        report = HtmlReport(facts, settings.report_chats, settings.rollout_bound)
        mismatches: list[Mismatch] = []
        with Tables(folder, facts) as tables:
            tokenized = _tokenized(records, models, template, settings, skip)
            while batch := list(islice(tokenized, BATCH)):
                for scored in _scored(models, batch, settings, skip):
                    report.add(tables.write(scored), scored)
                    summary.not_rendered.update(scored.tokenized.not_rendered)
                    mismatches += [] if scored.mismatch is None else [scored.mismatch]
                    on_progress()
            if not tables.chats:
                raise nothing_to_score(records.name, summary.skipped)
        summary.rows = tables.chats
        if mismatches:
            concatenated = map(torch.cat, zip(*mismatches, strict=True))
            summary.mismatch = Mismatch._make(concatenated).total()
        path = folder / "report.html"
        report.write(path, summary.rows, summary.figures(), summary.skipped)
    return summary


def _tokenized(
    records: Records,
    models: ModelPair,
    template: str | None,
    settings: Settings,
    skip: Callable[[ChatError], None],
) -> Iterator[TokenizedChat]:
    options = template, settings.context or models.context, settings.chat_template_kwargs
    for record in records.rows:
        try:
            found = parse_chats(record)
        except ChatError as error:
            skip(error)
            continue
        for chat in found:
            try:
                yield tokenize_chat(chat, models.tokenizer, *options)
            except ChatError as error:
                skip(error)


def _scored(
    models: ModelPair,
    batch: list[TokenizedChat],
    settings: Settings,
    skip: Callable[[ChatError], None],
) -> Iterator[ScoredChat]:
    """The scored chats of a batch; chats for which a model raises are skipped."""
    try:
        yield from score_batch(models, batch, settings)
    except (ValueError, IndexError, torch.OutOfMemoryError) as error:
        if len(batch) == 1:
            skip(ChatError(batch[0].chat.where, f"a model failed on the chat: {reason(error)}"))
            return
        for tokenized in batch:
            yield from _scored(models, [tokenized], settings, skip)
