"""The records of an input file: JSON lines, a JSON array or Parquet, told apart by content."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet

from fusedrl.scoring.errors import ScoreError, printable, reason

_BOM = b"\xef\xbb\xbf"
# The first bytes of files that are not JSON in UTF-8, although some of their lines may look so.
_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
    b"\x1f\x8b": "a gzip archive; decompress it: `gzip -dc FILE | fusedrl score - ...`",
    b"\x28\xb5\x2f\xfd": "a zstd archive; decompress it: `zstd -dc FILE | fusedrl score - ...`",
    b"BZh": "a bzip2 archive; decompress it: `bzip2 -dc FILE | fusedrl score - ...`",
    b"\xfd7zXZ": "an xz archive; decompress it: `xz -dc FILE | fusedrl score - ...`",
    b"PK\x03\x04": "a zip archive; decompress it: `unzip -p FILE | fusedrl score - ...`",
}
# What is read of Parquet, where it has any of them.
COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "chosen", "rejected"),
    *("system", "tools", "rollout_log_probs"),
)
LINES, ARRAY, PARQUET = "JSON lines", "a JSON array", "Parquet"


class Source(NamedTuple):
    """A file to read, and what errors call it."""

    path: Path
    name: str


class Record(NamedTuple):
    """One entry of the input, unchecked.

    ``line`` counts from 1: lines, elements of an array, or rows of Parquet.
    """

    where: str
    line: int
    raw: bytes | pyarrow.RecordBatch


@contextmanager
def opened(chats: str | Path | Source) -> Iterator[Source]:
    """The file of conversations; ``-`` is standard input, which is kept in a file for the block.

    Raises:
        ScoreError: nothing is piped into standard input, or it does not fit into the file.
    """
    if isinstance(chats, Source):
        yield chats
    elif str(chats) != "-":
        yield Source(Path(chats), str(chats))
    else:
        if sys.stdin is None or sys.stdin.isatty():
            raise ScoreError(
                "chats: expected conversations on standard input, got a terminal; pipe them into "
                "the command, or name their file in the place of -"
            )
        with tempfile.NamedTemporaryFile(prefix="fusedrl-chats-") as file:
            try:
                shutil.copyfileobj(sys.stdin.buffer, file)
                file.flush()
            except OSError as error:
                raise ScoreError(
                    f"chats: cannot keep standard input in {file.name}: {reason(error)}; set "
                    "TMPDIR to a folder with more space, or name a file in the place of -"
                ) from error
            yield Source(Path(file.name), "<stdin>")


def kind_of(source: Source) -> str:
    """``"JSON lines"``, ``"a JSON array"`` or ``"Parquet"``.

    Raises:
        ScoreError: the file cannot be read, or its first bytes are of something else.
    """
    with _readable(source):
        with source.path.open("rb") as file:
            start = file.read(8)
        if source.path.suffix.lower() == ".parquet" or start.startswith(b"PAR1"):
            return PARQUET
        for magic, what in _FOREIGN.items():
            if start.startswith(magic):
                raise ScoreError(
                    f"{source.name}: expected JSON in UTF-8 or Parquet, got {what}; then pass "
                    "the new file"
                )
        return ARRAY if _is_array(source.path) else LINES


def count_records(source: Source) -> int:
    """How many records :func:`read_records` yields; those of JSON lines are not parsed for it.

    Raises:
        ScoreError: the file cannot be read.
    """
    kind = kind_of(source)
    with _readable(source):
        if kind == PARQUET:
            with _parquet(source) as table:
                return table.metadata.num_rows
        if kind == ARRAY:
            return sum(1 for _ in _elements(source))
        with source.path.open("rb") as file:
            return sum(1 for line in file if not _blank(line))


def read_records(chats: Path | Source) -> Iterator[Record]:
    """The lines of a JSONL file (blank ones left out), or the entries of an array or of Parquet.

    Raises:
        ScoreError: the file cannot be read.
    """
    source = chats if isinstance(chats, Source) else Source(chats, str(chats))
    read = {LINES: _lines, ARRAY: _elements, PARQUET: _rows}[kind_of(source)]
    name = printable(source.name)
    with _readable(source):
        for line, raw in read(source):
            yield Record(f"{name}:{line}", line, raw)


def text_of(raw: bytes) -> str:
    """The text of a line.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    return raw.strip().decode("utf-8-sig")


def _lines(source: Source) -> Iterator[tuple[int, bytes]]:
    with source.path.open("rb") as file:
        yield from ((n, line) for n, line in enumerate(file, start=1) if not _blank(line))


def _blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def _is_array(path: Path) -> bool:
    """Whether a file of JSON is one list; a line that is a list may also stand before others."""
    with path.open("rb") as file:
        lines = (line for line in file if not _blank(line))
        first = next(lines, b"").removeprefix(_BOM).lstrip()
        if not first.startswith(b"["):
            return False
        try:
            json.loads(first)
        except (ValueError, RecursionError):
            return True  # the list goes on in the next line
        return next(lines, None) is None


def _elements(source: Source) -> Iterator[tuple[int, bytes]]:
    text, decoder, count = "", json.JSONDecoder(), 0
    try:
        text = text_of(source.path.read_bytes())
        at = _after_space(text, 1)
        while text[at : at + 1] != "]":
            _, end = decoder.raw_decode(text, at)
            count += 1
            yield count, text[at:end].encode("utf-8", "surrogatepass")
            at = _after_space(text, end)
            if text[at : at + 1] == ",":
                at = _after_space(text, at + 1)
            elif text[at : at + 1] != "]":
                json.loads(text)  # raises the error that names the place
        if text[at + 1 :]:
            json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ScoreError(
            f"{source.name}: not a readable JSON array: after element {count}: {reason(error)}; "
            "write it again, or write an object on each line"
        ) from error


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _rows(source: Source) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    with _parquet(source) as table:
        columns = [name for name in table.schema_arrow.names if name in COLUMNS]
        line = 0
        for batch in table.iter_batches(columns=columns or None):
            for row in range(len(batch)):
                line += 1
                yield line, batch.slice(row, 1)


@contextmanager
def _parquet(source: Source) -> Iterator[pyarrow.parquet.ParquetFile]:
    with source.path.open("rb") as file:  # pyarrow takes no path that is not UTF-8
        yield pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        # pyarrow raises OSError for a damaged page, too.
        what = "Parquet file" if isinstance(error, pyarrow.ArrowException) else "file"
        if source.path.suffix.lower() == ".parquet":
            what = "Parquet file"
        raise ScoreError(
            f"{source.name}: not a readable {what}: {reason(error)}; write it again"
        ) from error
