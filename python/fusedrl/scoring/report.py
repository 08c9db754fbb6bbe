"""``report.html``: a self-contained page that shows where the policy drifted."""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy
from jinja2 import Environment

from fusedrl.scoring.batch_scores import ScoredChat
from fusedrl.scoring.errors import ChatError
from fusedrl.scoring.output import explain_write_errors

LABELS = {
    "exact": "KL",
    "forward": "forward KL",
    "k1": "log-ratio (k1 estimate)",
    "k3": "k3 estimate",
}
_DIRECTION = re.compile("[\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069]")
_NO_WIDTH = re.compile("[\\u00ad\\u061c\\u200b-\\u200f\\u202a-\\u202e\\u2060-\\u206f\\ufeff]+")
# A token takes about 250 bytes; browsers become slow beyond some ten thousand.
MAX_TOKENS = 30_000


class View(NamedTuple):
    """A quantity that colours the tokens; its colour saturates at ``scale`` nats.

    A nonnegative quantity has a sequential colour scale, a ``signed`` one a diverging scale.
    """

    key: str
    label: str
    scale: float
    signed: bool


class HtmlReport:
    """Collects scored chats, keeps those with the most drift, and renders them."""

    def __init__(self, facts: dict[str, str], chats: int, rollout_bound: float = 2.0) -> None:
        """Start empty.

        Args:
            facts: the settings of the job by name.
            chats: number of chats to show.
            rollout_bound: truncation of the probability ratio of policy and engine.
        """
        self._facts = facts
        self._limit = chats
        self._rollout_bound = rollout_bound
        self._kept: list[tuple[dict[str, Any], ScoredChat]] = []
        self._kl: list[numpy.ndarray] = []
        self._log_ratios: list[numpy.ndarray] = []

    def add(self, row: dict[str, Any], scored: ScoredChat) -> None:
        """Add one chat and its row of ``chats.parquet``."""
        self._kl.append(scored.chosen_kl)
        if scored.rollout is not None:
            self._log_ratios.append(_log_ratios(scored))
        self._kept.append((row, scored))
        if len(self._kept) > 2 * self._limit:
            self._prune()

    def _prune(self) -> None:
        self._kept.sort(key=lambda kept: drift(kept[0]), reverse=True)
        del self._kept[self._limit :]

    def write(
        self,
        path: Path,
        rows: Sequence[dict[str, Any]],
        figures: dict[str, Any],
        skipped: Sequence[ChatError],
    ) -> None:
        """Render the page.

        ``rows`` has the rows of all chats, shown or not, and ``figures`` their summary statistics.
        """
        self._prune()
        views = self._views()
        budget, folder = MAX_TOKENS, common_folder(rows)
        chats = []
        for row, scored in self._kept:
            if budget <= 0:
                break
            shown = {k: v for k, v in row.items() if v is not None and k != "file"}
            where = scored.tokenized.chat.where.removeprefix(folder)
            chats.append(shown | {"where": where} | _conversation(scored, views, budget))
            budget -= len(scored.positions)
        page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
            Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
        )
        html = page.render(
            facts={name: _base(value) for name, value in self._facts.items()},
            views=views,
            chats=chats,
            data=plain(
                {
                    "views": [view._asdict() for view in views],
                    "chats": chats,
                    "mismatch": figures.get("rollout"),
                }
            ),
            figures=figures,
            rollout_bound=self._rollout_bound,
            rows=rows,
            max_tokens=MAX_TOKENS if len(chats) < len(self._kept) else None,
            skipped=[str(error).removeprefix(folder) for error in skipped],
            plots=self._plots(views[0].label, rows),
        )
        with explain_write_errors(path):
            # Keys that the template ignores may contain invalid text.
            path.write_text(html, encoding="utf-8", errors="backslashreplace")

    def _plots(self, label: str, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        kl = numpy.concatenate(self._kl)
        of_chats = numpy.array([row["kl_mean"] for row in rows])
        plots = [
            histogram(kl, f"{label} of each token, in nats", "token"),
            histogram(of_chats, f"Mean {label} of each chat, in nats", "chat"),
        ]
        if self._log_ratios:
            log_ratios = numpy.concatenate(self._log_ratios)
            plots.append(
                histogram(log_ratios, "Log-ratio of each token to its rollout, in nats", "token")
            )
        return plots

    def _views(self) -> list[View]:
        names = self._kept[0][1].kl
        values = [(e, LABELS[e], [scored.kl[e] for _, scored in self._kept]) for e in names]
        values.append(("entropy", "entropy", [scored.entropy for _, scored in self._kept]))
        rollouts = [_log_ratios(scored) for _, scored in self._kept if scored.rollout is not None]
        if rollouts:
            values.append(("rollout", "log-ratio to the rollout", rollouts))
        concatenated = [(key, label, numpy.concatenate(found)) for key, label, found in values]
        return [View(k, name, _saturation(v), bool((v < 0).any())) for k, name, v in concatenated]


def plain(value: Any, digits: int = 5) -> Any:
    """``value`` for JSON, without NaN and infinities, rounded to ``digits``."""
    if isinstance(value, dict):
        return {key: plain(item, digits) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


def drift(row: dict[str, Any]) -> float:
    """Sort key of a chat: its mean KL, with NaN first.

    Rounded as on the page, so that chats with equal shown KL keep the order of the file.
    """
    return math.inf if math.isnan(row["kl_mean"]) else float(f"{abs(row['kl_mean']):.5g}")


def common_folder(rows: Sequence[dict[str, Any]]) -> str:
    """The common directory of all files of chats, as a prefix of their names."""
    folders = [row["file"].rpartition("/")[0] + "/" for row in rows]
    return os.path.commonpath(folders) + "/" if all(len(f) > 1 for f in folders) else ""


def _base(path: str) -> str:
    """The last component of a path."""
    return path.rstrip("/").rpartition("/")[2] or path


def _saturation(values: numpy.ndarray) -> float:
    finite = numpy.abs(values[numpy.isfinite(values)])
    return max(float(numpy.quantile(finite, 0.95)) if finite.size else 0.0, 1e-6)


def _log_ratios(scored: ScoredChat) -> numpy.ndarray:
    """Log-ratio of policy and engine for each scored token, NaN without a rollout log-prob."""
    assert scored.rollout is not None
    return scored.policy - scored.rollout


def _values(scored: ScoredChat) -> dict[str, numpy.ndarray]:
    """The quantities that can colour the tokens of a chat."""
    values = {**scored.kl, "entropy": scored.entropy}
    return values if scored.rollout is None else values | {"rollout": _log_ratios(scored)}


def _conversation(scored: ScoredChat, views: Sequence[View], budget: int) -> dict[str, Any]:
    """The messages of a chat: scored ones as cells of tokens, others as text."""
    cells: dict[int, list[dict[str, Any]]] = {}
    tokenized = scored.tokenized
    known = _values(scored)
    colours = {view.key: known[view.key] for view in views if view.key in known}
    for i, position in enumerate(scored.positions[:budget]):
        values = {key: float(column[i]) for key, column in colours.items()}
        if scored.rollout is not None and numpy.isnan(scored.rollout[i]):
            del values["rollout"]
        cell = {
            "text": visible(tokenized.texts[position]),
            "policy": float(scored.policy[i]),
            "reference": float(scored.reference[i]),
            "values": values,
            "tokens": 1,
        }
        cells.setdefault(tokenized.turns[position], []).append(cell)
    messages = []
    for turn, message in enumerate(tokenized.chat.messages):
        text = message.get("content") or _json(message.get("tool_calls", ""))
        shown = _merged(cells[turn]) if turn in cells else None
        messages.append({"role": message["role"], "text": visible(text), "cells": shown})
    return {
        "messages": messages,
        "cut": max(len(scored.positions) - budget, 0),
    }


def visible(text: str) -> str:
    """``text`` with escapes for direction marks, and for a text without visible characters.

    Direction marks can disguise text: U+202E shows ``<|im_end|>`` as ``<|dne_mi|>``.
    """
    hidden = _NO_WIDTH if _NO_WIDTH.fullmatch(text) else _DIRECTION
    return hidden.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _json(value: Any) -> str:
    """``value`` as JSON for display; Parquet may contain dates and bytes, and JSON deep nesting."""
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, RecursionError):
        return reprlib.repr(value)


def _merged(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the cells of tokens that spell one character; log-probs and values are summed."""
    starts = numpy.cumsum([cell["text"] != "" for cell in cells])
    merged = []
    for _, group in groupby(zip(starts, cells, strict=True), key=lambda pair: pair[0]):
        parts = [cell for _, cell in group]
        merged.append(
            {
                "text": parts[0]["text"],
                "policy": sum(part["policy"] for part in parts),
                "reference": sum(part["reference"] for part in parts),
                "values": {
                    key: sum(part["values"].get(key, 0) for part in parts)
                    for key in parts[0]["values"]
                },
                "tokens": len(parts),
            }
        )
    return merged


def histogram(values: numpy.ndarray, label: str, unit: str, bins: int = 48) -> dict[str, Any]:
    """Histogram between the 1% and 99% quantiles, with heights on a log scale in [0, 1].

    Values beyond the quantiles count in the outermost bars.
    """
    finite = values[numpy.isfinite(values)].astype(numpy.float64)
    low, high = numpy.quantile(finite, [0.01, 0.99]) if finite.size else (0.0, 1.0)
    least = 1e-9 * max(1.0, abs(low), abs(high))  # minimum total width of the bars
    if high - low < least:
        low, high = low - 5e5 * least, high + 5e5 * least
    counts, edges = numpy.histogram(numpy.clip(finite, low, high), bins=bins, range=(low, high))
    top = math.log1p(counts.max(initial=1))
    bars = [
        {"x": i / bins, "height": math.log1p(n) / top, "count": int(n), "low": a, "high": b}
        for i, (n, a, b) in enumerate(zip(counts, edges, edges[1:], strict=False))
    ]
    return {"label": label, "unit": unit, "bars": bars, "most": int(counts.max(initial=0))}
