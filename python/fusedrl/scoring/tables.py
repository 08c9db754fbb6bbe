"""The two Parquet tables of a scoring job."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

from fusedrl.ops import Mismatch
from fusedrl.scoring.batch_scores import ScoredChat
from fusedrl.scoring.output import explain_write_errors

_TOKENS = [
    ("file", pyarrow.string()),
    ("chat", pyarrow.int64()),  # line of the file, from 1
    ("answer", pyarrow.string()),  # "chosen" or "rejected", null for chats that are no such pair
    ("turn", pyarrow.int32()),  # index into the chat's messages
    ("position", pyarrow.int32()),  # index into the chat's tokens
    ("token", pyarrow.int32()),
    ("text", pyarrow.string()),
    ("policy_log_prob", pyarrow.float32()),
    ("reference_log_prob", pyarrow.float32()),
    ("kl", pyarrow.float32()),  # exact, or by the chosen estimator
    ("kl_forward", pyarrow.float32()),  # null unless it was asked for
    ("kl_k1", pyarrow.float32()),
    ("kl_k3", pyarrow.float32()),
    ("entropy", pyarrow.float32()),
    ("reference_entropy", pyarrow.float32()),
    ("rollout_log_prob", pyarrow.float32()),  # null if it is not known
]
_CHATS = [
    ("file", pyarrow.string()),
    ("chat", pyarrow.int64()),
    ("answer", pyarrow.string()),
    ("turns", pyarrow.int32()),
    ("length", pyarrow.int32()),
    ("scored_tokens", pyarrow.int32()),
    ("policy_log_prob", pyarrow.float64()),
    ("reference_log_prob", pyarrow.float64()),
    ("kl_total", pyarrow.float64()),
    ("kl_mean", pyarrow.float64()),
    ("kl_forward_mean", pyarrow.float64()),
    ("kl_k1_mean", pyarrow.float64()),
    ("kl_k3_mean", pyarrow.float64()),
    ("entropy_mean", pyarrow.float64()),
    ("reference_entropy_mean", pyarrow.float64()),
    ("rollout_tokens", pyarrow.int32()),  # this and those below are null without rollout log-probs
    ("rollout_k1", pyarrow.float64()),
    ("rollout_k3", pyarrow.float64()),
    ("rollout_ess", pyarrow.float64()),
    ("rollout_max_ratio", pyarrow.float64()),
    ("rollout_clipped", pyarrow.float64()),
]
_MISMATCH = ("tokens", "k1", "k3", "ess", "max_ratio", "clipped")


class Tables:
    """Writes ``tokens.parquet`` chat by chat, and ``chats.parquet`` at the end of its block."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        """Open the first table.

        Args:
            folder: an existing directory.
            facts: the job's settings, kept in the metadata of both files.

        Raises:
            ScoreError: there is no space or no permission; also raised by :meth:`write` and at the
                end of the block.
        """
        self._folder = folder
        self._facts = facts
        self.chats: list[dict[str, Any]] = []
        # Files are opened here, because pyarrow takes no path that is not UTF-8.
        with explain_write_errors(folder / "tokens.parquet"):
            self._file = (folder / "tokens.parquet").open("wb")
        self._tokens = pyarrow.parquet.ParquetWriter(
            self._file, pyarrow.schema(_TOKENS, metadata=facts)
        )

    def __enter__(self) -> Tables:
        """The tables; the files are readable only after the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Finish both files, unless the block raised an error."""
        try:
            if kind is None:
                self._finish()
        finally:
            # A writer that could not finish would try again, and fail again, when it is collected.
            with suppress(Exception):
                self._tokens.close()
            with suppress(OSError):
                self._file.close()

    def write(self, scored: ScoredChat) -> dict[str, Any]:
        """Append one chat to both tables, and return its row of ``chats.parquet``."""
        with explain_write_errors(self._folder / "tokens.parquet"):
            self._tokens.write_table(_token_rows(scored, self._tokens.schema))
        self.chats.append(chat_row(scored))
        return self.chats[-1]

    def _finish(self) -> None:
        with explain_write_errors(self._folder / "tokens.parquet"):
            self._tokens.close()
            self._file.close()
        schema = pyarrow.schema(_CHATS, metadata=self._facts)
        table = pyarrow.Table.from_pylist(self.chats, schema=schema)
        path = self._folder / "chats.parquet"
        with explain_write_errors(path), path.open("wb") as file:
            pyarrow.parquet.write_table(table, file)


def _token_rows(scored: ScoredChat, schema: pyarrow.Schema) -> pyarrow.Table:
    tokenized = scored.tokenized
    columns = {
        "file": [tokenized.chat.file] * len(scored.positions),
        "chat": numpy.full(len(scored.positions), tokenized.chat.line),
        "answer": [tokenized.chat.answer] * len(scored.positions),
        "turn": [tokenized.turns[i] for i in scored.positions],
        "position": scored.positions,
        "token": [tokenized.token_ids[i] for i in scored.positions],
        "text": [tokenized.texts[i] for i in scored.positions],
        "policy_log_prob": scored.policy,
        "reference_log_prob": scored.reference,
        "kl": scored.chosen_kl,
        "kl_forward": scored.kl.get("forward", pyarrow.nulls(len(scored.positions))),
        "kl_k1": scored.kl["k1"],
        "kl_k3": scored.kl["k3"],
        "entropy": scored.entropy,
        "reference_entropy": scored.reference_entropy,
        "rollout_log_prob": _or_nulls(scored.rollout, len(scored.positions)),
    }
    return pyarrow.table(columns, schema=schema)


def _or_nulls(values: numpy.ndarray | None, count: int) -> pyarrow.Array:
    if values is None:
        return pyarrow.nulls(count, pyarrow.float32())
    return pyarrow.array(values, mask=numpy.isnan(values))


def mismatch_row(mismatch: Mismatch | None) -> dict[str, float | None]:
    """The figures of a mismatch by name; all are ``None`` if there is no mismatch."""
    if mismatch is None:
        return dict.fromkeys(_MISMATCH)
    return {name: getattr(mismatch, name).item() for name in _MISMATCH}


def chat_row(scored: ScoredChat) -> dict[str, Any]:
    """The row of ``chats.parquet`` for one chat; sums and means in float64."""

    def mean(values: numpy.ndarray) -> float:
        return float(values.mean(dtype=numpy.float64))

    kl = scored.chosen_kl
    forward = scored.kl.get("forward")
    return {
        "file": scored.tokenized.chat.file,
        "chat": scored.tokenized.chat.line,
        "answer": scored.tokenized.chat.answer,
        "turns": len({scored.tokenized.turns[i] for i in scored.positions}),
        "length": len(scored.tokenized.token_ids),
        "scored_tokens": len(scored.positions),
        "policy_log_prob": float(scored.policy.sum(dtype=numpy.float64)),
        "reference_log_prob": float(scored.reference.sum(dtype=numpy.float64)),
        "kl_total": float(kl.sum(dtype=numpy.float64)),
        "kl_mean": mean(kl),
        "kl_forward_mean": None if forward is None else mean(forward),
        "kl_k1_mean": mean(scored.kl["k1"]),
        "kl_k3_mean": mean(scored.kl["k3"]),
        "entropy_mean": mean(scored.entropy),
        "reference_entropy_mean": mean(scored.reference_entropy),
    } | {f"rollout_{name}": value for name, value in mismatch_row(scored.mismatch).items()}
