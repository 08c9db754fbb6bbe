"""The scoring job: it reads chats, runs two models, and writes two tables and a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy
import torch

import fusedrl
from fusedrl.ops import Mismatch
from fusedrl.scoring.batch_scores import ScoredChat, score_batch
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.errors import ChatError, ScoreError, printable, reason
from fusedrl.scoring.inputs import check_inputs, read_template
from fusedrl.scoring.output import publish, unfinished
from fusedrl.scoring.pretrained import ModelPair, load_pair
from fusedrl.scoring.records import Source, opened, read_records
from fusedrl.scoring.report import HtmlReport
from fusedrl.scoring.settings import Settings
from fusedrl.scoring.tables import Tables
from fusedrl.scoring.tokenization import TokenizedChat, tokenize_chat

# So many chats are scored together and share forward passes.
BATCH = 32


@dataclass
class Summary:
    """What a job did: a row for each chat, as in ``chats.parquet``, and the skipped chats.

    ``mismatch`` is over all tokens with a rollout log-prob, or ``None`` if there is no such token.
    ``shown`` is how many chats the report has, and ``replaced`` names the files of an earlier job
    that gave way.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[ChatError] = field(default_factory=list)
    mismatch: Mismatch | None = None
    shown: int = 0
    replaced: list[str] = field(default_factory=list)

    def mean(self, column: str) -> float:
        """Mean over all scored tokens of a per-chat mean such as ``"kl_mean"``."""
        weights = [row["scored_tokens"] for row in self.rows]
        return float(numpy.average([row[column] for row in self.rows], weights=weights))


def score_chats(
    chats: str | Path | Source,
    policy: str,
    reference: str,
    out: str | Path,
    settings: Settings | None = None,
    *,
    on_skip: Callable[[ChatError], None] = lambda error: None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Summary:
    """Score conversations under two models.

    Writes ``tokens.parquet``, ``chats.parquet`` and ``report.html`` into ``out``. The files are
    written into a temporary directory inside it and moved when all three are complete: a job that
    fails or is interrupted leaves the files of an earlier job as they were. A job that is killed
    leaves that directory behind.

    Args:
        chats: a file of JSON lines, a JSON array or Parquet; ``"-"`` for standard input. Rows are
            ``{"messages": [{"role", "content"}, ...]}``, ``{"prompt", "completion"}``,
            ``{"chosen", "rejected"}`` with or without a ``"prompt"``, or ``{"conversations":
            [{"from", "value"}, ...]}``. An optional ``"rollout_log_probs"`` has the engine's
            log-prob of each scored token or of each token.
        policy: directory or hub name of the trained model.
        reference: directory or hub name of the model that it is compared with.
        out: directory to write into; made if absent.
        settings: how to score; ``None`` for the defaults.
        on_skip: a function that is called with every chat that is skipped.
        on_progress: a function that is called with the number of chats done, scored or skipped.

    Raises:
        ScoreError: the vocabularies differ, a model or file does not load, or no chat can be
            scored.
        ChatError: with ``settings.strict``, a chat cannot be scored.

    Example:
        >>> from fusedrl.scoring import score_chats
        >>> summary = score_chats("chats.jsonl", "policy", "reference", "out")  # doctest: +SKIP
        >>> summary.mean("kl_mean")  # doctest: +SKIP
        0.031
    """
    settings, out = settings or Settings(), Path(out)
    with opened(chats) as source:
        return _score(source, policy, reference, out, settings, on_skip, on_progress)


def _score(
    chats: Source,
    policy: str,
    reference: str,
    out: Path,
    settings: Settings,
    on_skip: Callable[[ChatError], None],
    on_progress: Callable[[int], None],
) -> Summary:
    template_path = settings.chat_template
    inputs = [chats.path] if template_path is None else [chats.path, template_path]
    found = check_inputs(chats, policy, reference, template_path)
    template = read_template(template_path)
    summary = Summary()

    def skip(error: ChatError) -> None:
        if settings.strict:
            raise error
        summary.skipped.append(error)
        on_skip(error)
        on_progress(1)

    _check_some_chat(chats)
    with unfinished(out, inputs) as folder:
        models = load_pair(policy, reference, settings.device, settings.dtype, template)
        facts = {
            "chats": printable(chats.name),
            "format": found.format,
            "policy": printable(str(policy)),
            "reference": printable(str(reference)),
            "estimator": settings.estimator,
            "temperature": f"{settings.temperature:g}",
            "dtype": str(models.policy.dtype).removeprefix("torch."),
            "device": str(models.device),
            "fusedrl": fusedrl.__version__,
        }
        report = HtmlReport(
            facts, settings.estimator, settings.report_chats, settings.rollout_bound
        )
        mismatches: list[Mismatch] = []
        with Tables(folder, settings.estimator, facts) as tables:
            tokenized = _tokenized(chats, models, template, settings.context, skip)
            while batch := list(islice(tokenized, BATCH)):
                for scored in _scored(models, batch, settings, skip):
                    tables.write(scored)
                    report.add(scored)
                    mismatches += [] if scored.mismatch is None else [scored.mismatch]
                    on_progress(1)
            if not tables.chats:
                raise ScoreError(_nothing(chats, summary.skipped))
        summary.rows = tables.chats
        if mismatches:
            together = map(torch.cat, zip(*mismatches, strict=True))
            summary.mismatch = Mismatch._make(together).total()
        path = folder / "report.html"
        summary.shown = report.write(path, summary.rows, summary.skipped, summary.mismatch)
        summary.replaced = publish(folder, out)
    return summary


def _check_some_chat(chats: Source) -> None:
    """Refuse a file without any conversation, so that no model is loaded for it."""
    errors: list[ChatError] = []
    for record in read_records(chats):
        try:
            parse_chats(record)
        except ChatError as error:
            errors.append(error)
        else:
            return
    raise ScoreError(_nothing(chats, errors))


def _nothing(chats: Source, skipped: list[ChatError]) -> str:
    first = f"; the first: {skipped[0]}" if skipped else ""
    return f"{chats.name}: no chat to score, {len(skipped)} skipped{first}"


def _tokenized(
    chats: Source,
    models: ModelPair,
    template: str | None,
    context: int | None,
    skip: Callable[[ChatError], None],
) -> Iterator[TokenizedChat]:
    for record in read_records(chats):
        try:
            found = parse_chats(record)
        except ChatError as error:
            skip(error)
            continue
        for chat in found:
            try:
                yield tokenize_chat(chat, models.tokenizer, template, context or models.context)
            except ChatError as error:
                skip(error)


def _scored(
    models: ModelPair,
    batch: list[TokenizedChat],
    settings: Settings,
    skip: Callable[[ChatError], None],
) -> Iterator[ScoredChat]:
    """The scored chats of a batch, without those that a model refuses."""
    estimators = sorted({"k1", "k3", settings.estimator})
    try:
        yield from score_batch(
            models,
            batch,
            estimators,
            settings.temperature,
            settings.max_tokens_per_batch,
            settings.rollout_bound,
        )
    except (ValueError, IndexError, torch.OutOfMemoryError) as error:
        if len(batch) == 1:
            skip(ChatError(batch[0].chat.where, f"a model refuses the chat: {reason(error)}"))
            return
        for tokenized in batch:
            yield from _scored(models, [tokenized], settings, skip)
