"""Parse records of any supported format into conversations, and validate them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import pyarrow

from fusedrl.scoring.errors import ChatError, ScoreError, reason
from fusedrl.scoring.messages import Messages, Turn, brief, messages_of, tools_of, turn_of, value_of
from fusedrl.scoring.records import Record, Records

# Rounding in an engine can make the log-prob of a certain token slightly positive.
_ROUNDING = 1e-3


class Chat(NamedTuple):
    """A validated conversation: every message has a ``role``, and its content is text if present.

    ``rollout_log_probs`` are those that the engine reported, NaN for tokens without one.
    ``context`` has the indices of messages that are not scored, such as those of a prompt.
    ``answer`` is ``"chosen"`` or ``"rejected"`` for the two conversations of a preference pair.
    """

    file: str
    line: int
    messages: Messages
    tools: list[Any] | None = None
    rollout_log_probs: list[float] | None = None
    context: frozenset[int] = frozenset()
    answer: str | None = None

    @property
    def where(self) -> str:
        """The name of the chat in errors."""
        return f"{self.file}:{self.line}" + (f" ({self.answer})" if self.answer else "")


class _ParsedRow(NamedTuple):
    """A parsed row: the prompt if it is separate, each completion by its key, and the tools."""

    prompt: Any
    answers: dict[str, Any]
    tools: Any


def _from_messages(row: dict[str, Any], key: str) -> _ParsedRow:
    return _ParsedRow(None, {key: row[key]}, row.get("tools"))


def _from_answers(row: dict[str, Any], *keys: str) -> _ParsedRow:
    """Completions of a prompt, a conversation (LLaMA-Factory pairs) or an Alpaca instruction."""
    given = row.get("prompt"), row.get("conversations"), _instruction(row)
    prompt = next((value for value in given if value is not None), None)
    return _ParsedRow(prompt, {key: row[key] for key in keys}, row.get("tools"))


def _from_alpaca(row: dict[str, Any]) -> _ParsedRow:
    return _ParsedRow(_instruction(row), {"output": row["output"]}, row.get("tools"))


def _from_openai(row: dict[str, Any]) -> _ParsedRow:
    given = value_of(row["input"])
    if not isinstance(given, dict) or "messages" not in given:
        raise ValueError(f'input: expected {{"messages": [...]}}, got {brief(given)}')
    answers = {key: row[key] for key in ("preferred_output", "non_preferred_output")}
    return _ParsedRow(given["messages"], answers, given.get("tools"))


def _instruction(row: dict[str, Any]) -> Messages | None:
    """The history and the instruction of an Alpaca row; ``None`` for other rows."""
    if row.get("instruction") is None:
        return None
    turns, history = [], value_of(row.get("history") or [])
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history: expected pairs of question and answer, got {brief(pair)}")
        roles = zip(("user", "assistant"), pair, strict=True)
        turns += [{"role": role, "content": text} for role, text in roles]
    parts = [part for part in (row["instruction"], row.get("input")) if part]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"instruction, input: expected strings, got {brief(parts)}")
    return [*turns, {"role": "user", "content": "\n".join(parts)}]


# The keys of each format -> its parser. The first format whose keys are present is used.
_FORMATS: dict[tuple[str, ...], Callable[[dict[str, Any]], _ParsedRow]] = {
    ("input", "preferred_output", "non_preferred_output"): _from_openai,
    ("chosen", "rejected"): lambda row: _from_answers(row, "chosen", "rejected"),
    ("messages",): lambda row: _from_messages(row, "messages"),
    ("conversations",): lambda row: _from_messages(row, "conversations"),
    ("prompt", "completion"): lambda row: _from_answers(row, "completion"),
    ("instruction", "output"): _from_alpaca,
}


class Survey(NamedTuple):
    """The formats of an input, and its number of chats if all rows of a file are like the first."""

    chats: int
    format: str


def survey(records: Records) -> Survey:
    """Recognise the format of each file by its first valid row.

    Raises:
        ScoreError: no row can be parsed.
    """
    refused: list[ChatError] = []
    chats, formats = 0, {}
    for _, rows in groupby(records.rows, lambda record: record.file):
        rows = list(rows)
        for record in rows:
            try:
                found = parse_chats(record)
            except ChatError as error:
                refused.append(error)
                continue
            keys = " and ".join(map(repr, _keys(record.read())))
            both = ", both answers scored" if len(found) > 1 else ""
            formats[f"{record.format} with {keys}{both}"] = None
            chats += len(rows) * len(found)
            break
    if not formats:
        raise nothing_to_score(records.name, refused)
    return Survey(chats, "; ".join(formats))


def nothing_to_score(name: str, skipped: list[ChatError]) -> ScoreError:
    """The error for an input in which no row can be scored."""
    first = f"; the first: {skipped[0]}" if skipped else ""
    return ScoreError(f"{name}: no chat to score, {len(skipped)} skipped{first}")


def parse_chats(record: Record) -> list[Chat]:
    """Parse one record: a preference pair has two chats, every other format has one.

    Raises:
        ChatError: the format is unknown, or there is no assistant turn to score.
    """
    try:
        row = record.read()
    # UnicodeDecodeError is a ValueError; a date out of range raises an ArithmeticError.
    except (ValueError, ArithmeticError, RecursionError, pyarrow.ArrowException) as error:
        raise ChatError(record.where, f"unreadable line: {reason(error)}") from error
    try:
        return _chats(record, row)
    except (ValueError, OverflowError) as error:
        raise ChatError(record.where, str(error)) from error
    except RecursionError as error:
        raise ChatError(record.where, reason(error)) from error


def _chats(record: Record, row: Any) -> list[Chat]:
    """The chats of a row; raises ``ValueError`` for an invalid row."""
    parsed = _FORMATS[_keys(row)](row)
    prompt, pair = parsed.prompt, len(parsed.answers) > 1
    prompt = None if prompt is None else _as_context(messages_of("prompt", prompt, "user"))
    conversations = [_conversation(row, *item, prompt, pair) for item in parsed.answers.items()]
    if pair and prompt is None:
        shared = _common_prefix_length(*conversations)
        conversations = [_as_context(turns[:shared]) + turns[shared:] for turns in conversations]
    tools = tools_of(parsed.tools, row.get("functions"))
    log_probs = _log_probs(row.get("rollout_log_probs"))
    if pair and log_probs is not None:
        raise ValueError(
            "rollout_log_probs: expected none for a pair of answers, got a list; write each answer "
            "as a separate row"
        )
    chats = []
    names = ("chosen", "rejected") if pair else (None,)
    for key, answer, turns in zip(parsed.answers, names, conversations, strict=True):
        _check_assistant(key, turns)
        messages = [turn.message for turn in turns]
        context = frozenset(i for i, turn in enumerate(turns) if not turn.scored)
        place = record.file, record.line
        chats.append(Chat(*place, messages, tools, log_probs, context, answer))
    return chats


def _keys(row: Any) -> tuple[str, ...]:
    """The keys of the format of a row."""
    for keys in _FORMATS:
        if isinstance(row, dict) and all(row.get(key) is not None for key in keys):
            return keys
    known = "; ".join(" and ".join(keys) for keys in _FORMATS)
    raise ValueError(f"expected one of the key sets {known}, got {brief(row)}; rename the keys")


def _as_context(turns: Sequence[Turn]) -> list[Turn]:
    return [turn._replace(scored=False) for turn in turns]


def _common_prefix_length(chosen: list[Turn], rejected: list[Turn]) -> int:
    """Number of equal leading messages of two conversations, without the last of each."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return len([*takewhile(lambda pair: _same(*pair), pairs)])


def _conversation(
    row: dict[str, Any], key: str, value: Any, prompt: list[Turn] | None, pair: bool
) -> list[Turn]:
    """The conversation of an answer, with its prompt and system message."""
    turns = messages_of(key, value, None if prompt is None else "assistant")
    first = turns[0].message["role"] if turns else None
    if pair and prompt is None and first == "assistant":
        raise ValueError(
            f"{key}: expected a whole conversation, got only an answer; add what the answer "
            'replies to as "prompt"'
        )
    if prompt is not None:
        begins = len(turns) >= len(prompt) and all(map(_same, turns, prompt))
        if not begins and first in ("user", "system"):
            whole = '"chosen" and "rejected" without a prompt' if pair else '"messages"'
            raise ValueError(
                f"{key}: expected the messages after the prompt, or the whole conversation "
                f"including the prompt, got one that begins with {brief(turns[0].message)}; write "
                f"whole conversations as {whole}"
            )
        turns = prompt + turns[len(prompt) if begins else 0 :]
    if not row.get("system") or (turns and turns[0].message["role"] == "system"):
        return turns
    return [turn_of("system", {"role": "system", "content": row["system"]}), *turns]


def _same(one: Turn, other: Turn) -> bool:
    keys = ("role", "content", "tool_calls")
    return all(one.message.get(key) == other.message.get(key) for key in keys)


def _check_assistant(name: str, turns: Sequence[Turn]) -> None:
    if not any(turn.scored and turn.message["role"] == "assistant" for turn in turns):
        roles = [turn.message["role"] + " (not scored)" * (not turn.scored) for turn in turns]
        raise ValueError(
            f"{name}: expected an assistant message to score, got the roles "
            f"{brief(list(dict.fromkeys(roles)))}; leave the row out"
        )


def _log_probs(value: Any) -> list[float] | None:
    value, name = value_of(value), "rollout_log_probs"
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of numbers, got {brief(value)}")
    log_probs = [math.nan if item is None else item for item in value]
    for i, item in enumerate(log_probs):
        if not isinstance(item, int | float) or item > _ROUNDING:
            raise ValueError(
                f"{name}[{i}]: expected a log-prob, a number of at most 0 or null, "
                f"got {brief(item)}"
            )
    return [float(item) for item in log_probs]
