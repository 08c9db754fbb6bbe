"""Conversations from records of any shape, each checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby, takewhile
from typing import Any, NamedTuple

import pyarrow

from fusedrl.scoring.errors import ChatError, ScoreError, reason
from fusedrl.scoring.messages import Messages, Turn, brief, messages_of, tools_of, turn_of, value_of
from fusedrl.scoring.records import Record, Records

# A token that is certain may have a log-prob of this much above 0, by the rounding of an engine.
_ROUNDING = 1e-3


class Chat(NamedTuple):
    """A checked conversation: every message has a ``role`` and, where it has content, text.

    ``rollout_log_probs`` are those that the engine reported, with NaN for tokens without one.
    ``context`` has the indices of messages that are read and not scored, such as a prompt's.
    ``answer`` is ``"chosen"`` or ``"rejected"`` for the two conversations of a preference.
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
        """What errors call the chat."""
        return f"{self.file}:{self.line}" + (f" ({self.answer})" if self.answer else "")


class _Asked(NamedTuple):
    """A row in our words: what was asked, if the row says so, and each answer by its key."""

    prompt: Any
    answers: dict[str, Any]
    tools: Any


def _whole(row: dict[str, Any], key: str) -> _Asked:
    return _Asked(None, {key: row[key]}, row.get("tools"))


def _answered(row: dict[str, Any], *keys: str) -> _Asked:
    """Answers to a prompt, to a conversation (LLaMA-Factory's pairs) or to Alpaca's instruction."""
    given = row.get("prompt"), row.get("conversations"), _instruction(row)
    prompt = next((value for value in given if value is not None), None)
    return _Asked(prompt, {key: row[key] for key in keys}, row.get("tools"))


def _alpaca(row: dict[str, Any]) -> _Asked:
    return _Asked(_instruction(row), {"output": row["output"]}, row.get("tools"))


def _openai(row: dict[str, Any]) -> _Asked:
    asked = value_of(row["input"])
    if not isinstance(asked, dict) or "messages" not in asked:
        raise ValueError(f'input: expected {{"messages": [...]}}, got {brief(asked)}')
    answers = {key: row[key] for key in ("preferred_output", "non_preferred_output")}
    return _Asked(asked["messages"], answers, asked.get("tools"))


def _instruction(row: dict[str, Any]) -> Messages | None:
    """What Alpaca's rows say was asked before and at last; ``None`` for other rows."""
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


# The keys of each shape of rows, and how it is read. The first that a row has holds.
_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any]], _Asked]] = {
    ("input", "preferred_output", "non_preferred_output"): _openai,
    ("chosen", "rejected"): lambda row: _answered(row, "chosen", "rejected"),
    ("messages",): lambda row: _whole(row, "messages"),
    ("conversations",): lambda row: _whole(row, "conversations"),
    ("prompt", "completion"): lambda row: _answered(row, "completion"),
    ("instruction", "output"): _alpaca,
}


class Survey(NamedTuple):
    """How many chats an input has if all rows of a file are like its first, and its formats."""

    chats: int
    format: str


def survey(records: Records) -> Survey:
    """Recognise the shape of each file by its first conversation.

    Raises:
        ScoreError: no row is a conversation.
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
            both = ", whose answers are both scored" if len(found) > 1 else ""
            formats[f"{record.format} with {keys}{both}"] = None
            chats += len(rows) * len(found)
            break
    if not formats:
        raise nothing_to_score(records.name, refused)
    return Survey(chats, "; ".join(formats))


def nothing_to_score(name: str, skipped: list[ChatError]) -> ScoreError:
    """The error of an input none of whose rows can be scored."""
    first = f"; the first: {skipped[0]}" if skipped else ""
    return ScoreError(f"{name}: no chat to score, {len(skipped)} skipped{first}")


def parse_chats(record: Record) -> list[Chat]:
    """Check one record: a preference has two chats, and every other shape has one.

    Raises:
        ChatError: it has none of the shapes, or no assistant turn to score.
    """
    try:
        row = record.read()
    # UnicodeDecodeError is a ValueError; a date that is out of range raises an ArithmeticError.
    except (ValueError, ArithmeticError, RecursionError, pyarrow.ArrowException) as error:
        raise ChatError(record.where, f"unreadable line: {reason(error)}") from error
    try:
        return _chats(record, row)
    except (ValueError, OverflowError) as error:
        raise ChatError(record.where, str(error)) from error
    except RecursionError as error:
        raise ChatError(record.where, reason(error)) from error


def _chats(record: Record, row: Any) -> list[Chat]:
    """The chats of a row; a ``ValueError`` says what is wrong of it."""
    asked = _SHAPES[_keys(row)](row)
    prompt, pair = asked.prompt, len(asked.answers) > 1
    prompt = None if prompt is None else _unscored(messages_of("prompt", prompt, "user"))
    said = [_conversation(row, key, value, prompt, pair) for key, value in asked.answers.items()]
    if pair and prompt is None:
        shared = _shared(*said)
        said = [_unscored(turns[:shared]) + turns[shared:] for turns in said]
    tools = tools_of(asked.tools, row.get("functions"))
    log_probs = _log_probs(row.get("rollout_log_probs"))
    if pair and log_probs is not None:
        raise ValueError(
            "rollout_log_probs: expected none beside two answers, got a list; write each answer as "
            "a row of its own"
        )
    chats = []
    names = ("chosen", "rejected") if pair else (None,)
    for key, answer, turns in zip(asked.answers, names, said, strict=True):
        _check_assistant(key, turns)
        messages = [turn.message for turn in turns]
        context = frozenset(i for i, turn in enumerate(turns) if not turn.scored)
        place = record.file, record.line
        chats.append(Chat(*place, messages, tools, log_probs, context, answer))
    return chats


def _keys(row: Any) -> tuple[str, ...]:
    """The keys of the shape that a row has."""
    for keys in _SHAPES:
        if isinstance(row, dict) and all(row.get(key) is not None for key in keys):
            return keys
    known = "; ".join(" and ".join(keys) for keys in _SHAPES)
    raise ValueError(f"expected the keys {known}, got {brief(row)}; rename its keys")


def _unscored(turns: Sequence[Turn]) -> list[Turn]:
    return [turn._replace(scored=False) for turn in turns]


def _shared(chosen: list[Turn], rejected: list[Turn]) -> int:
    """How many messages two conversations begin with alike, besides the last of each."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return len([*takewhile(lambda pair: _same(*pair), pairs)])


def _conversation(
    row: dict[str, Any], key: str, value: Any, prompt: list[Turn] | None, pair: bool
) -> list[Turn]:
    """The conversation that an answer ends, with its prompt and its system message."""
    turns = messages_of(key, value, None if prompt is None else "assistant")
    first = turns[0].message["role"] if turns else None
    if pair and prompt is None and first == "assistant":
        raise ValueError(
            f"{key}: expected a conversation from its beginning, got an answer; name what was "
            'asked "prompt"'
        )
    if prompt is not None:
        begins = len(turns) >= len(prompt) and all(map(_same, turns, prompt))
        if not begins and first in ("user", "system"):
            whole = '"chosen" and "rejected" without a prompt' if pair else '"messages"'
            raise ValueError(
                f"{key}: expected what follows the prompt, or the whole conversation with the "
                f"prompt first, got a conversation that begins with {brief(turns[0].message)}; "
                f"write whole conversations as {whole}"
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
        roles = [turn.message["role"] + " (unscored)" * (not turn.scored) for turn in turns]
        raise ValueError(
            f"{name}: no assistant turn: the roles are {brief(list(dict.fromkeys(roles)))}, and "
            "only what an assistant said is scored"
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
