"""Read the rows of input files: JSON lines, a JSON array, Parquet or CSV, also gzipped."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.csv
import pyarrow.parquet

from fusedrl.scoring.errors import ScoreError, printable, reason

Reader = Callable[[], Any]
# The columns to read of Parquet files; all columns if a file has none of them.
COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("instruction", "input", "output", "history", "preferred_output", "non_preferred_output"),
    *("system", "tools", "functions", "rollout_log_probs"),
)
_UNREADABLE = (OSError, EOFError, ValueError, RecursionError, zlib.error, pyarrow.ArrowException)


class Record(NamedTuple):
    """A row of the input, not yet parsed; ``read`` parses it and may raise.

    ``line`` is the number, from 1, of the line, array element or table row in its file.
    """

    file: str
    line: int
    format: str
    read: Reader

    @property
    def where(self) -> str:
        """The file and the line."""
        return f"{self.file}:{self.line}"


class Records(NamedTuple):
    """The rows of all files; standard input has no path."""

    paths: list[Path]
    name: str  # of the input, in errors
    rows: list[Record]


def read_records(chats: str | Path | Sequence[str | Path], limit: int | None = None) -> Records:
    """Read the rows of files, without blank lines.

    Args:
        chats: one or more paths, or patterns such as ``"data/*.jsonl"``; ``"-"`` is standard input.
        limit: maximum number of rows; ``None`` for all.

    Raises:
        ScoreError: a file cannot be read, or there is no row.
    """
    given = [chats] if isinstance(chats, str | Path) else chats
    found: dict[Path | None, Path | None] = {}
    for path in (path for one in given for path in _matching(one)):
        found.setdefault(path and path.resolve(), path)  # read each file once
    rows = list(islice((row for path in found.values() for row in _rows_of(path)), limit))
    names = [*map(_name, found.values())]
    name = names[0] if len(names) == 1 else f"{len(names)} files"
    if not rows:
        empty = "the file is empty" if len(names) == 1 else "all of them are empty"
        raise ScoreError(f"{name}: {empty}; pass a file with chats")
    return Records([path for path in found if path is not None], name, rows)


def _matching(given: str | Path) -> list[Path | None]:
    """The files that a path or a pattern names; ``None`` for standard input."""
    if str(given) == "-":
        return [None]
    if os.path.lexists(given):
        return [Path(given)]
    found = glob.glob(str(given), recursive=True)  # noqa: PTH207 (Path.glob refuses absolute patterns)
    paths: list[Path | None] = [p for p in map(Path, sorted(found)) if not p.is_dir()]
    if not paths:
        shown = printable(str(given))
        raise ScoreError(f"chats: cannot read {shown}: no such file; check the path")
    return paths


def _name(path: Path | None) -> str:
    return "<stdin>" if path is None else printable(str(path))


def _rows_of(path: Path | None) -> Iterator[Record]:
    try:
        if path is None and sys.stdin is None:
            raise ValueError("standard input is closed")
        content = sys.stdin.buffer.read() if path is None else path.read_bytes()
        name = "" if path is None else path.name.lower().removesuffix(".gz")
        form, readers = _readers(content, name.endswith((".csv", ".tsv")))
    except _UNREADABLE as error:
        remedy = "check the path, or save the file again in UTF-8"
        if path is not None and path.is_dir():
            remedy = f"pass its files, as in '{printable(str(path))}/*.jsonl'"
        raise ScoreError(f"chats: cannot read {_name(path)}: {reason(error)}; {remedy}") from error
    return (Record(_name(path), n, form, read) for n, read in readers)


def _readers(content: bytes, is_csv: bool) -> tuple[str, Iterable[tuple[int, Reader]]]:
    """The format of a file, and a reader for each row."""
    if content.startswith(b"\x1f\x8b"):
        content = gzip.decompress(content)
    if content.startswith(b"PAR1"):
        source = pyarrow.BufferReader(content)
        table = pyarrow.parquet.ParquetFile(source, page_checksum_verification=True)
        columns = [name for name in table.schema_arrow.names if name in COLUMNS]
        return "Parquet", _rows_of_batches(table.iter_batches(columns=columns or None))
    start = content.removeprefix(codecs.BOM_UTF8).lstrip()
    if is_csv and start and not start.startswith((b"[", b"{")):
        return "CSV", _rows_of_batches(_csv_table(content).to_batches())
    if start.startswith(b"["):
        elements = enumerate(parsed(content), start=1)
        return "a JSON array", [(n, lambda row=row: row) for n, row in elements]
    if start.startswith(b"{") and b"\n" in start.rstrip():
        with suppress(ValueError, RecursionError):
            one = parsed(content)
            return "a JSON object", [(1, lambda: one)]
    lines = enumerate(io.BytesIO(content), start=1)
    bare = ((n, line.removeprefix(codecs.BOM_UTF8)) for n, line in lines)
    return "JSON lines", [(n, partial(parsed, line)) for n, line in bare if line.strip()]


def _rows_of_batches(batches: Iterable[pyarrow.RecordBatch]) -> list[tuple[int, Reader]]:
    places = [(batch, i) for batch in batches for i in range(len(batch))]
    return [(n, partial(_row, *place)) for n, place in enumerate(places, start=1)]


def _row(batch: pyarrow.RecordBatch, index: int) -> dict[str, Any]:
    return batch.slice(index, 1).to_pylist()[0]


def _csv_table(content: bytes) -> pyarrow.Table:
    """Read CSV with column names in the first line; an empty cell is null."""
    if content.count(b'"') % 2:
        raise ValueError("a quotation mark is not closed, or not doubled within a cell")
    head = content.partition(b"\n")[0]
    separator = max(",;\t", key=lambda each: head.count(each.encode()))
    quoted = pyarrow.csv.ParseOptions(newlines_in_values=True, delimiter=separator)
    # A single block, since pyarrow refuses rows longer than a block.
    block = pyarrow.csv.ReadOptions(block_size=min(len(content), 2**31 - 1))
    source = partial(pyarrow.BufferReader, content)
    names = pyarrow.csv.open_csv(source(), block, quoted).schema.names
    if any(names.count(name) > 1 for name in COLUMNS):
        raise ValueError("two columns have the same name")
    strings = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pyarrow.string()),
        strings_can_be_null=True,
        null_values=[""],
    )
    return pyarrow.csv.read_csv(source(), block, quoted, strings)


def parsed(text: bytes | str) -> Any:
    """Parse JSON, with NaN as null; a duplicate key in an object is a ``ValueError``."""
    # Not json.loads(bytes), which guesses the encoding.
    string = text.decode("utf-8-sig") if isinstance(text, bytes) else text
    return json.loads(string, object_pairs_hook=_object, parse_constant=_constant)


def _constant(name: str) -> float | None:
    # Some libraries write missing values of tables as NaN.
    return None if name == "NaN" else float(name)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a duplicate key is refused, since json would drop the first value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"duplicate key {twice[:60]!r} in an object")
    return made
