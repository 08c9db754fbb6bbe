"""Conversations from records of any shape, each checked before anything is computed from it."""

from __future__ import annotations

import json
import math
from itertools import islice
from typing import Any, NamedTuple

import pyarrow

from fusedrl.scoring.errors import ChatError, reason
from fusedrl.scoring.messages import (
    brief,
    check_objects,
    decoded,
    looks_like_messages,
    messages_of,
)
from fusedrl.scoring.records import Record, Source, count_records, kind_of, read_records, text_of

# A token that is certain may have a log-prob of this much above 0, by the rounding of an engine.
_ROUNDING = 1e-3
_LARGEST = 1e30  # stays in float32
# What the keys of a row say of it, in the order in which they are asked; the first that fits holds.
_SHAPES = {
    ("chosen", "rejected"): "'chosen' and 'rejected', which are both scored",
    ("messages",): "'messages'",
    ("conversations",): "'conversations'",
    ("prompt", "completion"): "'prompt' and 'completion'",
}
# Names that other data sets have for a prompt and its answer.
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_ANSWERS = ("completion", "output", "response", "answer")


class Chat(NamedTuple):
    """A checked conversation: every message has a ``role`` and, where it has content, text.

    ``rollout_log_probs`` are those that the engine reported, with NaN for tokens without one.
    Turns before message ``start`` are a prompt, which is not scored. ``answer`` is ``"chosen"`` or
    ``"rejected"`` for the two conversations of a preference.
    """

    where: str
    line: int
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    rollout_log_probs: list[float] | None = None
    start: int = 0
    answer: str | None = None


class Survey(NamedTuple):
    """How many chats an input has if all its rows are like the first, and in which format."""

    chats: int
    format: str


def survey(source: Source) -> Survey:
    """Count the records of an input, and recognise their shape by the first that can be read.

    Raises:
        ScoreError: the file cannot be read.
    """
    count = count_records(source)
    for record in islice(read_records(source), 100):
        try:
            shape = _shape(_parsed(record))
        except ChatError:
            continue
        if shape is not None:
            pairs = 2 if "chosen" in shape else 1
            return Survey(count * pairs, f"{kind_of(source)} with {_SHAPES[shape]}")
    return Survey(count, kind_of(source))


def parse_chats(record: Record) -> list[Chat]:
    """Check one record: a preference has two chats, and every other shape has one.

    Raises:
        ChatError: it has none of the shapes, or no assistant turn to score.
    """
    row = _parsed(record)
    shape = _shape(row)
    if shape is None:
        raise ChatError(record.where, _unknown(row, isinstance(record.raw, bytes)))
    rollout = _log_probs(record.where, "rollout_log_probs", row.get("rollout_log_probs"))
    tools = row.get("tools") or None
    tools = _json(tools) if isinstance(tools, str) else tools
    check_objects(record.where, "tools", tools)
    if "chosen" in shape:
        if rollout is not None:
            raise ChatError(
                record.where,
                "rollout_log_probs: expected none beside two answers, got a list; write each "
                "answer as a row of its own",
            )
        return [
            Chat(f"{record.where} ({name})", record.line, messages, tools, None, start, name)
            for name, messages, start in _preference(record.where, row)
        ]
    if "completion" in shape:
        messages, start = _answered(record.where, row, "completion")
    else:
        messages, start = _with_system(row, messages_of(record.where, shape[0], row[shape[0]])), 0
    _check_assistant(record.where, messages, start)
    return [Chat(record.where, record.line, messages, tools, rollout, start)]


def _shape(row: Any) -> tuple[str, ...] | None:
    if isinstance(row, dict):
        for keys in _SHAPES:
            if all(row.get(key) is not None for key in keys):
                return keys
    return None


def _preference(where: str, row: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]], int]]:
    """Both answers: name, conversation, and where what the two do not share begins."""
    (chosen, at_chosen), (rejected, at_rejected) = (
        _answered(where, row, key) for key in ("chosen", "rejected")
    )
    if row.get("prompt") is None:
        longest = min(len(chosen), len(rejected)) - 1
        at_chosen = at_rejected = next(
            (i for i in range(longest) if _text(chosen[i]) != _text(rejected[i])), max(longest, 0)
        )
    found = [("chosen", chosen, at_chosen), ("rejected", rejected, at_rejected)]
    for name, messages, start in found:
        _check_assistant(f"{where} ({name})", messages, start)
    return found


def _answered(where: str, row: dict[str, Any], key: str) -> tuple[list[dict[str, Any]], int]:
    """The conversation of a prompt and an answer, and the number of the prompt's messages."""
    answer = messages_of(where, key, row[key], "assistant")
    if row.get("prompt") is None:
        if isinstance(decoded(row[key]), str):
            raise ChatError(
                where,
                f"{key}: expected a list of messages without a 'prompt', got {brief(row[key])}; "
                "split it into 'prompt' and answer, or into messages",
            )
        return _with_system(row, answer), 0
    prompt = messages_of(where, "prompt", row["prompt"], "user")
    begun = list(map(_text, answer[: len(prompt)])) == list(map(_text, prompt))
    if not begun and answer and answer[0]["role"] in ("user", "system"):
        raise ChatError(
            where,
            f"{key}: expected what follows the prompt, or the whole conversation with the prompt "
            f"first, got a conversation that begins with {brief(answer[0])}; leave out 'prompt'",
        )
    together = answer if begun else prompt + answer
    whole = _with_system(row, together)
    return whole, len(whole) - len(together) + len(prompt)


def _text(message: dict[str, Any]) -> tuple[Any, Any, Any]:
    return message["role"], message.get("content"), message.get("tool_calls")


def _with_system(row: dict[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages behind the row's ``system``, which other shapes than ``messages`` may have."""
    system = row.get("system")
    if not isinstance(system, str) or not system or row.get("messages") is not None:
        return messages
    if messages and messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _check_assistant(where: str, messages: list[dict[str, Any]], start: int) -> None:
    if not messages:
        raise ChatError(where, "empty chat: messages has no message")
    roles = {message["role"]: None for message in messages[start:]}
    if "assistant" not in roles:
        raise ChatError(
            where,
            f"no assistant turn: the roles are {brief(list(roles))}, and only what an assistant "
            "said is scored",
        )


def _unknown(row: Any, json_lines: bool) -> str:
    """What is wrong of a row that has none of the shapes, and the line that converts it."""
    expected = (
        'expected {"messages": [...]}, {"conversations": [...]}, {"prompt", "completion"} or '
        f'{{"chosen", "rejected"}}, got {brief(row)}'
    )
    if looks_like_messages(row):
        return f"{expected}; convert it: `jq -c '{{messages: .}}' FILE | fusedrl score - ...`"
    if not isinstance(row, dict):
        return expected
    for key, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            made = f"{{messages: .{key}}}" if looks_like_messages(value) else f".{key}[]"
            return f"{expected}; {_conversion(made, {key: 'messages'}, json_lines)}"
    prompt = next((key for key in _PROMPTS if key in row), "PROMPT")
    answer = next((key for key in _ANSWERS if key in row), "ANSWER")
    made = f"{{prompt: .{prompt}, completion: .{answer}}}"
    return f"{expected}; {_conversion(made, {prompt: 'prompt', answer: 'completion'}, json_lines)}"


def _conversion(made: str, names: dict[str, str], json_lines: bool) -> str:
    if json_lines:
        return f"convert it: `jq -c '{made}' FILE | fusedrl score - ...`"
    return (
        'rename its columns: `python -c "from pyarrow import parquet as p; '
        f"t = p.read_table('FILE'); p.write_table(t.rename_columns([{names}.get(n, n) "
        "for n in t.column_names]), 'chats.parquet')\"`"
    )


def _parsed(record: Record) -> Any:
    try:
        if not isinstance(record.raw, bytes):
            return record.raw.to_pylist()[0]
        return json.loads(text_of(record.raw), object_pairs_hook=_object)
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
        raise ValueError(f"the key {brief(twice)} stands twice in one object")
    return made


def _json(text: str) -> Any:
    """What a string holds as JSON, or the string."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _log_probs(where: str, name: str, value: Any) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise ChatError(where, f"{name}: expected a list of numbers, got {brief(value)}")
    log_probs = [math.nan if item is None else item for item in value]
    for i, item in enumerate(log_probs):
        number = isinstance(item, int | float) and not isinstance(item, bool)
        if not number or item > _ROUNDING or (item < -_LARGEST and item != -math.inf):
            raise ChatError(
                where,
                f"{name}[{i}]: expected a log-prob, a number of at most 0 or null, "
                f"got {brief(item)}",
            )
    return [float(item) for item in log_probs]
