"""The two Parquet tables of a scoring job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet

from fusedrl.ops import Mismatch
from fusedrl.scoring.batch_scores import ScoredChat
from fusedrl.scoring.output import explain_write_errors

_Column = tuple[pyarrow.DataType, Callable[[ScoredChat], Any]]
_MISMATCH = ("tokens", "k1", "k3", "ess", "max_ratio", "clipped")


def _of_chat(name: str) -> Callable[[ScoredChat], Any]:
    return lambda scored: [getattr(scored.tokenized.chat, name)] * len(scored.positions)


def _at_positions(name: str) -> Callable[[ScoredChat], Any]:
    return lambda scored: [getattr(scored.tokenized, name)[i] for i in scored.positions]


def _kl(name: str) -> Callable[[ScoredChat], Any]:
    return lambda scored: scored.kl.get(name)


def _of_mismatch(name: str) -> Callable[[ScoredChat], float | None]:
    return lambda scored: scored.mismatch and getattr(scored.mismatch, name).item()


def _mean(values: Callable[[ScoredChat], Any]) -> Callable[[ScoredChat], float | None]:
    def mean(scored: ScoredChat) -> float | None:
        found = values(scored)
        return None if found is None else float(found.mean(dtype=numpy.float64))

    return mean


def _sum(values: Callable[[ScoredChat], Any]) -> Callable[[ScoredChat], float]:
    return lambda scored: float(values(scored).sum(dtype=numpy.float64))


_INT64, _INT32, _STRING = pyarrow.int64(), pyarrow.int32(), pyarrow.string()
_FLOAT32, _FLOAT64 = pyarrow.float32(), pyarrow.float64()
# The columns of tokens.parquet; None stands for a column of nulls.
_TOKENS: dict[str, _Column] = {
    "file": (_STRING, _of_chat("file")),
    "chat": (_INT64, _of_chat("line")),  # from 1
    "answer": (_STRING, _of_chat("answer")),  # of a preference pair
    "turn": (_INT32, _at_positions("turns")),  # index into the chat's messages
    "position": (_INT32, lambda scored: scored.positions),  # index into the chat's tokens
    "token": (_INT32, _at_positions("token_ids")),
    "text": (_STRING, _at_positions("texts")),
    "policy_log_prob": (_FLOAT32, lambda scored: scored.policy),
    "reference_log_prob": (_FLOAT32, lambda scored: scored.reference),
    "kl": (_FLOAT32, lambda scored: scored.chosen_kl),
    "kl_forward": (_FLOAT32, _kl("forward")),
    "kl_k1": (_FLOAT32, _kl("k1")),
    "kl_k3": (_FLOAT32, _kl("k3")),
    "entropy": (_FLOAT32, lambda scored: scored.entropy),
    "reference_entropy": (_FLOAT32, lambda scored: scored.reference_entropy),
    "rollout_log_prob": (_FLOAT32, lambda scored: _or_nulls(scored.rollout)),
}
# The columns of chats.parquet; sums and means in float64.
_CHATS: dict[str, _Column] = {
    "file": (_STRING, lambda scored: scored.tokenized.chat.file),
    "chat": (_INT64, lambda scored: scored.tokenized.chat.line),
    "answer": (_STRING, lambda scored: scored.tokenized.chat.answer),
    "turns": (_INT32, lambda scored: len({scored.tokenized.turns[i] for i in scored.positions})),
    "length": (_INT32, lambda scored: len(scored.tokenized.token_ids)),
    "scored_tokens": (_INT32, lambda scored: len(scored.positions)),
    "policy_log_prob": (_FLOAT64, _sum(lambda scored: scored.policy)),
    "reference_log_prob": (_FLOAT64, _sum(lambda scored: scored.reference)),
    "kl_total": (_FLOAT64, _sum(lambda scored: scored.chosen_kl)),
    "kl_mean": (_FLOAT64, _mean(lambda scored: scored.chosen_kl)),
    "kl_forward_mean": (_FLOAT64, _mean(_kl("forward"))),
    "kl_k1_mean": (_FLOAT64, _mean(_kl("k1"))),
    "kl_k3_mean": (_FLOAT64, _mean(_kl("k3"))),
    "entropy_mean": (_FLOAT64, _mean(lambda scored: scored.entropy)),
    "reference_entropy_mean": (_FLOAT64, _mean(lambda scored: scored.reference_entropy)),
    **{
        f"rollout_{name}": (
            _INT32 if name == "tokens" else _FLOAT64,
            _of_mismatch(name),
        )
        for name in _MISMATCH
    },
}


def _schema(columns: dict[str, _Column], facts: dict[str, str]) -> pyarrow.Schema:
    return pyarrow.schema([(name, kind) for name, (kind, _) in columns.items()], metadata=facts)


class Tables:
    """Writes ``tokens.parquet`` chat by chat, and ``chats.parquet`` at the end of the block."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        """Open ``tokens.parquet``.

        Args:
            folder: an existing directory.
            facts: the settings of the job, stored in the metadata of both files.

        Raises:
            ScoreError: the file cannot be written; also raised by :meth:`write` and at the end of
                the block.
        """
        self._folder = folder
        self._facts = facts
        self.chats: list[dict[str, Any]] = []
        # Pass open files, since pyarrow refuses paths that are not UTF-8.
        with explain_write_errors(folder / "tokens.parquet"):
            self._file = (folder / "tokens.parquet").open("wb")
        self._tokens = pyarrow.parquet.ParquetWriter(self._file, _schema(_TOKENS, facts))

    def __enter__(self) -> Tables:
        """The tables; the files are complete only after the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Finish both files, unless the block raised."""
        try:
            if kind is None:
                self._finish()
        finally:
            # A writer that failed would try and fail again when garbage-collected.
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
        schema = _schema(_CHATS, self._facts)
        table = pyarrow.Table.from_pylist(self.chats, schema=schema)
        path = self._folder / "chats.parquet"
        with explain_write_errors(path), path.open("wb") as file:
            pyarrow.parquet.write_table(table, file)


def _token_rows(scored: ScoredChat, schema: pyarrow.Schema) -> pyarrow.Table:
    found = {name: values(scored) for name, (_, values) in _TOKENS.items()}
    nulls = pyarrow.nulls(len(scored.positions))
    columns = {name: nulls if values is None else values for name, values in found.items()}
    return pyarrow.table(columns, schema=schema)


def _or_nulls(values: numpy.ndarray | None) -> pyarrow.Array | None:
    return None if values is None else pyarrow.array(values, mask=numpy.isnan(values))


def mismatch_row(mismatch: Mismatch | None) -> dict[str, float | None]:
    """The statistics of a mismatch by name; all are ``None`` without a mismatch."""
    if mismatch is None:
        return dict.fromkeys(_MISMATCH)
    return {name: getattr(mismatch, name).item() for name in _MISMATCH}


def chat_row(scored: ScoredChat) -> dict[str, Any]:
    """The row of ``chats.parquet`` for one chat."""
    return {name: value(scored) for name, (_, value) in _CHATS.items()}
