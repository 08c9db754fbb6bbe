"""The scoring job: chats and two models in, two tables and a report out."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

import fusedrl
from fusedrl.scoring.batches import score_batch
from fusedrl.scoring.chats import ChatError, ScoreError, parse_chat, read_records
from fusedrl.scoring.masks import TokenizedChat, tokenize_chat
from fusedrl.scoring.models import ModelPair, load_pair
from fusedrl.scoring.report import Report
from fusedrl.scoring.tables import Tables

# Chats scored at a time, which share forward passes.
BATCH = 32


@dataclass(frozen=True)
class Settings:
    """How to score.

    Args:
        estimator: KL estimator behind ``kl`` and the ranking: ``k1``, ``k2``, ``k3`` or ``abs``.
            k3, the default, is never negative, token by token.
        temperature: divisor of both models' logits.
        device: torch device, or ``"auto"``.
        dtype: ``"auto"`` (float32 on the CPU, the checkpoint's own elsewhere) or a torch dtype.
        max_tokens_per_batch: tokens of one forward pass, padding included; ``None`` for what
            :func:`fusedrl.models.causal_log_probs` chooses.
        chat_template: file with a Jinja chat template that replaces the tokenizer's.
        strict: stop at the first chat that cannot be scored, instead of skipping it.
        report_chats: how many of the most-drifted chats the report shows.
    """

    estimator: str = "k3"
    temperature: float = 1.0
    device: str = "auto"
    dtype: str = "auto"
    max_tokens_per_batch: int | None = None
    chat_template: Path | None = None
    strict: bool = False
    report_chats: int = 50


@dataclass
class Summary:
    """What a job did: a row a chat (the columns of ``chats.parquet``) and the chats it skipped."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[ChatError] = field(default_factory=list)

    def mean(self, column: str) -> float:
        """Mean over all scored tokens of a per-chat mean such as ``"kl_mean"``."""
        weights = [row["scored_tokens"] for row in self.rows]
        return float(numpy.average([row[column] for row in self.rows], weights=weights))


def score_chats(
    chats: str | Path,
    policy: str,
    reference: str,
    out: str | Path,
    settings: Settings | None = None,
    *,
    on_skip: Callable[[ChatError], None] = lambda error: None,
    on_progress: Callable[[int], None] = lambda count: None,
) -> Summary:
    """Score conversations under two models.

    Writes ``tokens.parquet``, ``chats.parquet`` and ``report.html`` into ``out``. They are written
    in a temporary directory inside it and moved when all three are complete: a job that fails or is
    interrupted leaves the files of an earlier one as they were.

    Args:
        chats: JSONL, or Parquet by its suffix, of ``{"messages": [{"role", "content"}, ...]}``.
        policy: directory or hub name of the model that was trained.
        reference: the same for the model it is compared with.
        out: directory to write into; made if absent.
        settings: how to score; ``None`` for the defaults.
        on_skip: called with every chat that is skipped.
        on_progress: called with the number of chats done, scored or skipped.

    Raises:
        ScoreError: two vocabularies, a model or file that does not load, nothing left to score.
        ChatError: with ``settings.strict``, the first chat that cannot be scored.

    Example:
        >>> from fusedrl.scoring import score_chats
        >>> summary = score_chats("chats.jsonl", "policy", "reference", "out")  # doctest: +SKIP
        >>> summary.mean("kl_mean")  # doctest: +SKIP
        0.031
    """
    settings = settings or Settings()
    chats, out, template = Path(chats), Path(out), settings.chat_template
    for name, path in (("chats", chats), ("chat_template", template)):
        if path is not None and not path.is_file():
            raise ScoreError(f"{name}: expected a file, found none at {path}")
    if out.exists() and not out.is_dir():
        raise ScoreError(f"out: expected a directory or a new name, got the file {out}")
    template = template and template.read_text(encoding="utf-8")
    models = load_pair(policy, reference, settings.device, settings.dtype, template)
    facts = {
        "chats": str(chats),
        "policy": policy,
        "reference": reference,
        "estimator": settings.estimator,
        "temperature": f"{settings.temperature:g}",
        "dtype": str(models.policy.dtype).removeprefix("torch."),
        "device": str(models.device),
        "fusedrl": fusedrl.__version__,
    }
    summary = Summary()

    def skip(error: ChatError) -> None:
        if settings.strict:
            raise error
        summary.skipped.append(error)
        on_skip(error)
        on_progress(1)

    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".unfinished-") as unfinished:
        tables = Tables(Path(unfinished), settings.estimator, facts)
        report = Report(facts, settings.estimator, settings.report_chats)
        tokenized = _tokenized(chats, models, template, skip)
        estimators = sorted({"k1", "k3", settings.estimator})
        while batch := list(islice(tokenized, BATCH)):
            for scored in score_batch(
                models, batch, estimators, settings.temperature, settings.max_tokens_per_batch
            ):
                tables.write(scored)
                report.add(scored)
            on_progress(len(batch))
        tables.close()
        summary.rows = tables.chats
        if not summary.rows:
            raise ScoreError(f"{chats}: no chat to score, {len(summary.skipped)} skipped")
        report.write(Path(unfinished) / "report.html", summary.rows, summary.skipped)
        for name in ("tokens.parquet", "chats.parquet", "report.html"):
            (Path(unfinished) / name).replace(out / name)
    return summary


def _tokenized(
    path: Path, models: ModelPair, template: str | None, skip: Callable[[ChatError], None]
) -> Iterator[TokenizedChat]:
    for record in read_records(path):
        try:
            tokenized = tokenize_chat(parse_chat(record), models.tokenizer, template)
            length = len(tokenized.token_ids)
            if models.context is not None and length > models.context:
                raise ChatError(
                    record.where,
                    f"expected at most {models.context} tokens, the models' context, got {length}; "
                    "shorten or split the chat",
                )
        except ChatError as error:
            skip(error)
        else:
            yield tokenized
