"""The rows of an input file: JSON lines, a JSON array or Parquet, told apart by content."""

from __future__ import annotations

import codecs
import io
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from fusedrl.scoring.errors import ScoreError, printable, reason

# What is read of Parquet, where it has any of them.
COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("system", "tools", "rollout_log_probs"),
)


class Record(NamedTuple):
    """A row of the input, unchecked; ``read`` parses it, and raises what the parser raises.

    ``line`` counts from 1: lines, elements of an array, or rows of Parquet.
    """

    where: str
    line: int
    read: Callable[[], Any]


class Records(NamedTuple):
    """All rows of an input, which is read once; ``path`` is ``None`` for standard input."""

    path: Path | None
    format: str
    rows: list[Record]

    @property
    def name(self) -> str:
        """What errors call the input."""
        return "<stdin>" if self.path is None else printable(str(self.path))


def read_records(chats: str | Path) -> Records:
    """The rows of a file; of JSON lines those that are not blank. ``-`` is standard input.

    Raises:
        ScoreError: the file cannot be read.
    """
    path = None if str(chats) == "-" else Path(chats)
    name = Records(path, "", []).name
    try:
        if path is None and sys.stdin is None:
            raise ValueError("standard input is closed")
        content = sys.stdin.buffer.read() if path is None else path.read_bytes()
        if content.startswith(b"PAR1"):
            form, readers = "Parquet", list(enumerate(_parquet(content), start=1))
        elif content.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            form, elements = "a JSON array", _parsed(content)
            readers = [(n, lambda row=row: row) for n, row in enumerate(elements, start=1)]
        else:
            form, lines = "JSON lines", enumerate(io.BytesIO(content), start=1)
            bare = ((n, line.removeprefix(codecs.BOM_UTF8)) for n, line in lines)
            readers = [(n, partial(_parsed, line)) for n, line in bare if line.strip()]
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise ScoreError(
            f"chats: cannot read {name}: {reason(error)}; check the path, or write the file again"
        ) from error
    return Records(path, form, [Record(f"{name}:{n}", n, read) for n, read in readers])


def _parquet(content: bytes) -> Iterator[Callable[[], Any]]:
    source = pyarrow.BufferReader(content)
    table = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
    columns = [name for name in table.schema_arrow.names if name in COLUMNS]
    for batch in table.iter_batches(columns=columns or None):
        yield from (partial(_row, batch, i) for i in range(len(batch)))


def _row(batch: pyarrow.RecordBatch, index: int) -> dict[str, Any]:
    return batch.slice(index, 1).to_pylist()[0]


def _parsed(text: bytes) -> Any:
    # json takes bytes too, and guesses their encoding: a line of UTF-16 would be another text.
    return json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that occurs twice is refused, because it would hide the first value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:60]!r} stands twice in one object")
    return made
