"""Conversations from JSONL or Parquet, each checked before anything is computed from it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet


class ScoreError(ValueError):
    """Input that the whole job cannot go on with; the message says what to change."""


class ChatError(ScoreError):
    """One chat that cannot be scored; the message starts with ``file:line``."""

    def __init__(self, where: str, problem: str) -> None:
        """``where`` is ``file:line``."""
        super().__init__(f"{where}: {problem}")


class Record(NamedTuple):
    """One line of the input, unchecked: ``line`` counts from 1 (rows, for Parquet)."""

    where: str
    line: int
    raw: bytes | dict[str, Any]


class Chat(NamedTuple):
    """A checked conversation: every message has a ``role`` and, where it has content, text."""

    where: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None


def count_records(path: Path) -> int:
    """How many records :func:`read_records` yields, without parsing them."""
    if path.suffix == ".parquet":
        return _parquet(path).metadata.num_rows
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def read_records(path: Path) -> Iterator[Record]:
    """The lines of a JSONL file (blank ones left out), or the rows of a ``.parquet`` file.

    Raises:
        ScoreError: a Parquet file that does not open or has no ``messages`` column.
    """
    if path.suffix != ".parquet":
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                if raw.strip():
                    yield Record(f"{path}:{line}", line, raw)
        return
    file = _parquet(path)
    columns = [name for name in ("messages", "tools") if name in file.schema_arrow.names]
    if "messages" not in columns:
        raise ScoreError(
            f"{path}: expected a column 'messages', got {', '.join(file.schema_arrow.names)}"
        )
    line = 0
    for batch in file.iter_batches(columns=columns):
        for row in batch.to_pylist():
            line += 1
            yield Record(f"{path}:{line}", line, row)


def _parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise ScoreError(f"{path}: not a readable Parquet file: {error}") from error


def parse_chat(record: Record) -> Chat:
    """Check one record.

    Raises:
        ChatError: anything but ``{"messages": [{"role", "content"}, ...]}`` with an assistant turn.
    """
    row = record.raw
    if isinstance(row, bytes):
        try:
            row = json.loads(row)
        except ValueError as error:  # UnicodeDecodeError is one, too.
            raise ChatError(record.where, f"unreadable line: {error}") from error
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list):
        raise ChatError(record.where, 'expected {"messages": [...]}, got ' + _brief(row))
    if not messages:
        raise ChatError(record.where, "empty chat: messages has no message")
    messages = [_message(record.where, i, message) for i, message in enumerate(messages)]
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ChatError(
            record.where,
            f"no assistant turn: the roles are {', '.join(roles)}, and only what an assistant "
            "said is scored",
        )
    assert isinstance(row, dict)
    return Chat(record.where, record.line, messages, row.get("tools"))


def _message(where: str, index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatError(
            where, f'messages[{index}]: expected {{"role", "content"}}, got {_brief(message)}'
        )
    content = message.get("content")
    if isinstance(content, list):
        content = _text_of_parts(where, index, content)
    elif content is None and not message.get("tool_calls"):
        raise ChatError(where, f"messages[{index}]: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ChatError(
            where, f"messages[{index}].content: expected a string, got {_brief(content)}"
        )
    try:
        (content or "").encode()
    except UnicodeEncodeError as error:
        raise ChatError(where, f"messages[{index}].content: not valid Unicode: {error}") from error
    # A Parquet struct has every key in every message; templates want the absent ones absent.
    kept = {key: value for key, value in message.items() if value is not None}
    return kept if content is None else kept | {"content": content}


def _text_of_parts(where: str, index: int, parts: list[Any]) -> str:
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            raise ChatError(
                where, f"messages[{index}].content: expected text parts only, got {_brief(part)}"
            )
    return "".join(text for text in texts if text is not None)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
