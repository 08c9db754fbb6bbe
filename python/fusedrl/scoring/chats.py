"""Conversations from records of any shape, each checked before anything is computed from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby, takewhile
from reprlib import Repr
from typing import Any, NamedTuple

import pyarrow

from fusedrl.scoring.errors import ChatError, ScoreError, reason
from fusedrl.scoring.records import Record, Records, parsed

Messages = list[dict[str, Any]]

# A token that is certain may have a log-prob of this much above 0, by the rounding of an engine.
_ROUNDING = 1e-3
# Who speaks, in the words of ShareGPT and in those of chat templates.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
# A list of messages as a spreadsheet or Python writes it: cut off, or with other quotes.
_OTHER_LIST = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
# What data sets say of a message that is not trained on, if it is 0 or false.
_WEIGHTS = ("weight", "train", "loss_mask")


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


class _Turn(NamedTuple):
    """A message, and whether it is scored if the assistant said it."""

    message: dict[str, Any]
    scored: bool = True


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
    asked = _json(row["input"])
    if not isinstance(asked, dict) or "messages" not in asked:
        raise ValueError(f'input: expected {{"messages": [...]}}, got {_brief(asked)}')
    answers = {key: row[key] for key in ("preferred_output", "non_preferred_output")}
    return _Asked(asked["messages"], answers, asked.get("tools"))


def _instruction(row: dict[str, Any]) -> Messages | None:
    """What Alpaca's rows say was asked before and at last; ``None`` for other rows."""
    if row.get("instruction") is None:
        return None
    turns, history = [], _json(row.get("history") or [])
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history: expected pairs of question and answer, got {_brief(pair)}")
        roles = zip(("user", "assistant"), pair, strict=True)
        turns += [{"role": role, "content": text} for role, text in roles]
    parts = [part for part in (row["instruction"], row.get("input")) if part]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"instruction, input: expected strings, got {_brief(parts)}")
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
    prompt = None if prompt is None else _unscored(_messages("prompt", prompt, "user"))
    said = [_conversation(row, key, value, prompt, pair) for key, value in asked.answers.items()]
    if pair and prompt is None:
        shared = _shared(*said)
        said = [_unscored(turns[:shared]) + turns[shared:] for turns in said]
    tools, log_probs = _tools(row, asked.tools), _log_probs(row.get("rollout_log_probs"))
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
    raise ValueError(f"expected the keys {known}, got {_brief(row)}; rename its keys")


def _unscored(turns: Sequence[_Turn]) -> list[_Turn]:
    return [turn._replace(scored=False) for turn in turns]


def _shared(chosen: list[_Turn], rejected: list[_Turn]) -> int:
    """How many messages two conversations begin with alike, besides the last of each."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return len([*takewhile(lambda pair: _same(*pair), pairs)])


def _conversation(
    row: dict[str, Any], key: str, value: Any, prompt: list[_Turn] | None, pair: bool
) -> list[_Turn]:
    """The conversation that an answer ends, with its prompt and its system message."""
    turns = _messages(key, value, None if prompt is None else "assistant")
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
                f"prompt first, got a conversation that begins with {_brief(turns[0].message)}; "
                f"write whole conversations as {whole}"
            )
        turns = prompt + turns[len(prompt) if begins else 0 :]
    if not row.get("system") or (turns and turns[0].message["role"] == "system"):
        return turns
    return [_turn("system", {"role": "system", "content": row["system"]}), *turns]


def _same(one: _Turn, other: _Turn) -> bool:
    keys = ("role", "content", "tool_calls")
    return all(one.message.get(key) == other.message.get(key) for key in keys)


def _check_assistant(name: str, turns: Sequence[_Turn]) -> None:
    if not any(turn.scored and turn.message["role"] == "assistant" for turn in turns):
        roles = [turn.message["role"] + " (unscored)" * (not turn.scored) for turn in turns]
        raise ValueError(
            f"{name}: no assistant turn: the roles are {_brief(list(dict.fromkeys(roles)))}, and "
            "only what an assistant said is scored"
        )


def _messages(name: str, value: Any, speaker: str | None = None) -> list[_Turn]:
    """A list of messages, which may be written as JSON; a string is what ``speaker`` says."""
    found = [value] if _says_who_speaks(value) else _json(value)
    if found and isinstance(found, list) and all(map(_says_who_speaks, found)):
        value = found
    elif isinstance(value, str) and _OTHER_LIST.match(value):
        raise ValueError(
            f"{name}: expected a list of messages, got text that is no JSON: {_brief(value)}; "
            "write the list with json.dumps, or the table as Parquet"
        )
    if isinstance(value, str) and speaker is not None:
        value = [{"role": speaker, "content": value}]
    if not isinstance(value, list):
        raise ValueError(
            f'{name}: expected a list of messages, as in {{"{name}": [...]}}, or a text and a '
            f'"prompt" beside it, got {_brief(value)}'
        )
    return [_turn(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _says_who_speaks(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or item.keys() >= {"from", "value"})


def _turn(name: str, given: Any) -> _Turn:
    """A message in the words of chat templates."""
    # A Parquet struct has every key in every message; templates expect absent keys to be absent.
    message = _without_nulls(given)
    if isinstance(message, dict) and "role" not in message and "from" in message:
        message = _from_sharegpt(name, message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{name}: expected {{"role", "content"}}, got {_brief(given)}')
    if message["role"] == "function":  # OpenAI's first name for it
        message["role"] = "tool"
    weights = [message.pop(key) for key in _WEIGHTS if key in message]
    if not all(weight in (0, 1) for weight in weights):
        raise ValueError(f"{name}: {', '.join(_WEIGHTS)}: expected 0 or 1, got {_brief(weights)}")
    calls, older = (_json(message.pop(key, None)) for key in ("tool_calls", "function_call"))
    if calls := _list_of(f"{name}.tool_calls", calls or (older and [{"function": older}])):
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of_part(f"{name}.content", part) for part in content)
    elif content is None and "tool_calls" not in message:
        raise ValueError(f"{name}: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ValueError(f"{name}.content: expected a string, got {_brief(content)}")
    return _Turn(message, all(weights))


def _from_sharegpt(name: str, message: dict[str, Any]) -> dict[str, Any]:
    speaker, value = message.pop("from"), message.pop("value", None)
    if speaker not in list(_SPEAKERS):
        known = ", ".join(_SPEAKERS)
        raise ValueError(f"{name}.from: expected one of {known}, got {_brief(speaker)}; rename it")
    if speaker != "function_call":
        return {**message, "role": _SPEAKERS[speaker], "content": value}
    calls = _json(value)
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "role": _SPEAKERS[speaker], "tool_calls": calls}


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """A call in the words of chat templates, with arguments; they may still be JSON."""
    function = call.get("function", call)
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        bare = function.keys() <= {"name", "type", "id"}  # a function without arguments
        arguments = function.get("arguments", {} if bare else None)
        if isinstance(arguments_of(arguments), dict):
            outer = call if "function" in call else {}
            called = {**function, "arguments": arguments}
            return {"type": "function", **outer, "function": called}
    raise ValueError(
        f"{name}: expected a name and arguments, which are an object or its JSON, got "
        f"{_brief(call)}; correct the call, or leave out the row"
    )


def arguments_of(value: Any) -> Any:
    """The arguments of a tool call as an object, where they are written as JSON."""
    return {} if value == "" else _json(value)


def _text_of_part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text parts only, got {_brief(part)}")
    return text


def _tools(row: dict[str, Any], given: Any) -> list[Any] | None:
    """What the assistant could call, each as ``{"type": "function", "function": ...}``."""
    tools = _list_of("tools", _json(given)) or _list_of("functions", _json(row.get("functions")))
    tools = [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]
    return _without_nulls(tools) or None


def _list_of(name: str, value: Any) -> list[Any]:
    """A list of JSON objects, which is empty for nothing."""
    value = value or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: expected a list of objects, got {_brief(value)}")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without keys that are null, which Arrow gives to a row because another has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _log_probs(value: Any) -> list[float] | None:
    value, name = _json(value), "rollout_log_probs"
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError(f"{name}: expected a list of numbers, got {_brief(value)}")
    log_probs = [math.nan if item is None else item for item in value]
    for i, item in enumerate(log_probs):
        if not isinstance(item, int | float) or item > _ROUNDING:
            raise ValueError(
                f"{name}[{i}]: expected a log-prob, a number of at most 0 or null, "
                f"got {_brief(item)}"
            )
    return [float(item) for item in log_probs]


def _json(value: Any) -> Any:
    """What a string holds as JSON, or the value as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return parsed(value)
    return value


# The start of a value in an error, however large or deep the value is.
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def _brief(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
