"""Conversations from JSONL or Parquet, each checked before anything is computed from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from reprlib import Repr
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from fusedrl.scoring.errors import ChatError, ScoreError, printable, reason

_BOM = b"\xef\xbb\xbf"
_COLUMNS = ("messages", "tools", "rollout_log_probs")
# A token that is certain may have a log-prob of this much above 0, by the rounding of an engine.
_ROUNDING = 1e-3
_LARGEST = 1e30  # stays in float32
# The first bytes of files that are not JSONL in UTF-8, although some of their lines may look so.
_FOREIGN = {
    b"\xff\xfe": "UTF-16 text; convert it to UTF-8",
    b"\xfe\xff": "UTF-16 text; convert it to UTF-8",
    b"\x1f\x8b": "a gzip archive; decompress it",
    b"\x28\xb5\x2f\xfd": "a zstd archive; decompress it",
    b"BZh": "a bzip2 archive; decompress it",
    b"\xfd7zXZ": "an xz archive; decompress it",
    b"PK\x03\x04": "a zip archive; decompress it",
    b"PAR1": "Parquet; give its name the suffix .parquet",
}


class Record(NamedTuple):
    """One line of the input, unchecked: ``line`` counts from 1 (rows, for Parquet)."""

    where: str
    line: int
    raw: bytes | pyarrow.RecordBatch


class Chat(NamedTuple):
    """A checked conversation: every message has a ``role`` and, where it has content, text.

    ``rollout_log_probs`` are those that the engine reported, with NaN for tokens without one.
    """

    where: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    rollout_log_probs: list[float] | None = None


def count_records(path: Path) -> int:
    """How many records :func:`read_records` yields, without parsing them.

    Raises:
        ScoreError: the file cannot be read, or is neither JSONL nor Parquet with ``messages``.
    """
    with _readable(path):
        if _is_parquet(path):
            with _parquet(path) as table:
                return table.metadata.num_rows
        with path.open("rb") as file:
            start = file.read(8)
            for magic, what in _FOREIGN.items():
                if start.startswith(magic):
                    raise ScoreError(
                        f"{path}: expected JSONL in UTF-8, got {what}; convert it, or name a "
                        "Parquet file .parquet"
                    )
            file.seek(0)
            return sum(1 for line in file if not _blank(line))


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a JSONL file (blank ones left out), or the rows of a ``.parquet`` file.

    Raises:
        ScoreError: the file cannot be read, or is a Parquet file without a ``messages`` column.
    """
    name = printable(str(path))
    with _readable(path):
        for line, raw in _rows(path) if _is_parquet(path) else _lines(path):
            yield Record(f"{name}:{line}", line, raw)


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from ((n, line) for n, line in enumerate(file, start=1) if not _blank(line))


def _blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def _rows(path: Path) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    with _parquet(path) as table:
        columns = [name for name in _COLUMNS if name in table.schema_arrow.names]
        line = 0
        for batch in table.iter_batches(columns=columns):
            for row in range(len(batch)):
                line += 1
                yield line, batch.slice(row, 1)


@contextmanager
def _parquet(path: Path) -> Iterator[pyarrow.parquet.ParquetFile]:
    with path.open("rb") as file:  # opened here, because pyarrow takes no path that is not UTF-8
        table = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        names = table.schema_arrow.names
        if "messages" not in names:
            raise ScoreError(
                f"{path}: expected a column 'messages', got {', '.join(names)}; rename the one "
                "that has the chats"
            )
        yield table


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, pyarrow.ArrowException) as error:
        # pyarrow raises OSError for a damaged page, too.
        what = "Parquet file" if _is_parquet(path) else "file"
        raise ScoreError(
            f"{path}: not a readable {what}: {reason(error)}; write it again"
        ) from error


def parse_chat(record: Record) -> Chat:
    """Check one record.

    Raises:
        ChatError: it is not ``{"messages": [{"role", "content"}, ...]}`` with an assistant turn.
    """
    row = _parsed(record)
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(row, dict) or not isinstance(messages, list):
        raise ChatError(record.where, 'expected {"messages": [...]}, got ' + _brief(row))
    if not messages:
        raise ChatError(record.where, "empty chat: messages has no message")
    messages = [_message(record.where, i, message) for i, message in enumerate(messages)]
    roles = {message["role"]: None for message in messages}
    if "assistant" not in roles:
        raise ChatError(
            record.where,
            f"no assistant turn: the roles are {_brief(list(roles))}, and only what an assistant "
            "said is scored",
        )
    tools = row.get("tools") or None
    _check_objects(record.where, "tools", tools)
    rollout = _log_probs(record.where, "rollout_log_probs", row.get("rollout_log_probs"))
    return Chat(record.where, record.line, messages, tools, rollout)


def _parsed(record: Record) -> Any:
    try:
        if not isinstance(record.raw, bytes):
            return record.raw.to_pylist()[0]
        return json.loads(record.raw.strip().decode("utf-8-sig"), object_pairs_hook=_object)
    except RecursionError as error:
        raise ChatError(record.where, "unreadable line: nested too deeply") from error
    # UnicodeDecodeError is a ValueError; a date that is out of range raises an ArithmeticError.
    except (ValueError, ArithmeticError, pyarrow.ArrowException) as error:
        raise ChatError(record.where, f"unreadable line: {reason(error)}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that occurs twice is refused, because it would hide the first value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise ValueError(f"the key {_brief(twice)} stands twice in one object")
    return made


def _message(where: str, index: int, message: Any) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatError(where, f'{name}: expected {{"role", "content"}}, got {_brief(message)}')
    content, calls = message.get("content"), message.get("tool_calls")
    _check_objects(where, f"{name}.tool_calls", calls)
    if isinstance(content, list):
        content = _text_of_parts(where, f"{name}.content", content)
    elif content is None and not calls:
        raise ChatError(where, f"{name}: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ChatError(where, f"{name}.content: expected a string, got {_brief(content)}")
    for key, text in (("role", message["role"]), ("content", content or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(where, f"{name}.{key}: not valid Unicode: {error}") from error
    # A Parquet struct has every key in every message; templates expect absent keys to be absent.
    kept = {key: value for key, value in message.items() if value is not None}
    return kept if content is None else kept | {"content": content}


def _text_of_parts(where: str, name: str, parts: list[Any]) -> str:
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            raise ChatError(where, f"{name}: expected text parts only, got {_brief(part)}")
    return "".join(text for text in texts if text is not None)


def _check_objects(where: str, name: str, value: Any) -> None:
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ChatError(where, f"{name}: expected a list of objects, got {_brief(value)}")


def _log_probs(where: str, name: str, value: Any) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ChatError(where, f"{name}: expected a list of numbers, got {_brief(value)}")
    log_probs = [math.nan if item is None else item for item in value]
    for i, item in enumerate(log_probs):
        number = isinstance(item, int | float) and not isinstance(item, bool)
        if not number or item > _ROUNDING or (item < -_LARGEST and item != -math.inf):
            raise ChatError(
                where,
                f"{name}[{i}]: expected a log-prob, a number of at most 0 or null, "
                f"got {_brief(item)}",
            )
    return [float(item) for item in log_probs]


# The start of a value in an error, however large or deep the value is.
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def _brief(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
