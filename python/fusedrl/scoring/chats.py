"""Conversations from records of any shape, each checked before anything is computed from it."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from reprlib import Repr
from typing import Any, NamedTuple

import pyarrow

from fusedrl.scoring.errors import ChatError, ScoreError, reason
from fusedrl.scoring.records import Record, Records

Messages = list[dict[str, Any]]

# A token that is certain may have a log-prob of this much above 0, by the rounding of an engine.
_ROUNDING = 1e-3
# What the keys of a row say of it, in the order in which they are asked; the first that fits holds.
_SHAPES = {
    ("chosen", "rejected"): "'chosen' and 'rejected', which are both scored",
    ("messages",): "'messages'",
    ("conversations",): "'conversations'",
    ("prompt", "completion"): "'prompt' and 'completion'",
}
# Who speaks, in the words of ShareGPT and in those of chat templates.
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation"), "tool"),
}


class Chat(NamedTuple):
    """A checked conversation: every message has a ``role`` and, where it has content, text.

    ``rollout_log_probs`` are those that the engine reported, with NaN for tokens without one.
    Turns before message ``start`` are a prompt, which is not scored. ``answer`` is ``"chosen"`` or
    ``"rejected"`` for the two conversations of a preference.
    """

    where: str
    line: int
    messages: Messages
    tools: list[Any] | None
    rollout_log_probs: list[float] | None = None
    start: int = 0
    answer: str | None = None


class Survey(NamedTuple):
    """How many chats an input has if all its rows are like the first, and in which format."""

    chats: int
    format: str


def survey(records: Records) -> Survey:
    """Recognise the shape of an input by its first conversation.

    Raises:
        ScoreError: no row is a conversation.
    """
    refused = []
    for record in records.rows:
        try:
            chats = parse_chats(record)
        except ChatError as error:
            refused.append(error)
        else:
            form = f"{records.format} with {_SHAPES[_shape(record.read())]}"
            return Survey(len(records.rows) * len(chats), form)
    raise nothing_to_score(records.name, refused)


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


def _chats(record: Record, row: Any) -> list[Chat]:
    """The chats of a row; a ``ValueError`` says what is wrong of it."""
    keys = _shape(row)
    tools = _json(row.get("tools")) or None
    _check_objects("tools", tools)
    rollout = _log_probs("rollout_log_probs", row.get("rollout_log_probs"))
    if "chosen" not in keys:
        messages, start = _conversation(row, keys[-1])
        _check_assistant(keys[-1], messages, start)
        return [Chat(record.where, record.line, messages, tools, rollout, start)]
    if rollout is not None:
        raise ValueError(
            "rollout_log_probs: expected none beside two answers, got a list; write each answer as "
            "a row of its own"
        )
    (chosen, at_chosen), (rejected, at_rejected) = (_conversation(row, key) for key in keys)
    if row.get("prompt") is None:  # it is what the two have in common
        longest = max(min(len(chosen), len(rejected)) - 1, 0)
        differ = (i for i in range(longest) if _text(chosen[i]) != _text(rejected[i]))
        at_chosen = at_rejected = next(differ, longest)
    chats = []
    for name, messages, start in zip(
        keys, (chosen, rejected), (at_chosen, at_rejected), strict=True
    ):
        _check_assistant(name, messages, start)
        where = f"{record.where} ({name})"
        chats.append(Chat(where, record.line, messages, tools, None, start, name))
    return chats


def _shape(row: Any) -> tuple[str, ...]:
    for keys in _SHAPES:
        if isinstance(row, dict) and all(row.get(key) is not None for key in keys):
            return keys
    raise ValueError(
        'expected {"messages": [...]}, {"conversations": [...]}, {"prompt", "completion"} or '
        f'{{"chosen", "rejected"}}, got {_brief(row)}; rename its keys'
    )


def _conversation(row: dict[str, Any], key: str) -> tuple[Messages, int]:
    """The conversation under a key of a row, and how many of its messages are a prompt."""
    whole = key in ("messages", "conversations")
    prompt = None if whole else row.get("prompt")
    if prompt is None:
        messages, start = _messages(key, row[key]), 0
    else:
        asked = _messages("prompt", prompt, "user")
        messages, start = _messages(key, row[key], "assistant"), len(asked)
        if list(map(_text, messages[:start])) != list(map(_text, asked)):
            if messages and messages[0]["role"] in ("user", "system"):
                raise ValueError(
                    f"{key}: expected what follows the prompt, or the whole conversation with the "
                    f"prompt first, got a conversation that begins with {_brief(messages[0])}; "
                    "leave out 'prompt'"
                )
            messages = asked + messages
    system = row.get("system")
    begins = bool(messages) and messages[0]["role"] == "system"
    if key == "messages" or begins or not isinstance(system, str) or not system:
        return messages, start
    return [{"role": "system", "content": system}, *messages], start + 1


def _text(message: dict[str, Any]) -> tuple[Any, Any, Any]:
    return message["role"], message.get("content"), message.get("tool_calls")


def _check_assistant(name: str, messages: Messages, start: int) -> None:
    roles = [message["role"] for message in messages[start:]]
    if "assistant" not in roles:
        raise ValueError(
            f"{name}: no assistant turn: the roles are {_brief(list(dict.fromkeys(roles)))}, and "
            "only what an assistant said is scored"
        )


def _messages(name: str, value: Any, speaker: str | None = None) -> Messages:
    """A list of messages, which may be written as JSON; a string is what ``speaker`` says."""
    found = _json(value)
    if found and isinstance(found, list) and all(map(_says_who_speaks, found)):
        value = found
    if isinstance(value, str) and speaker is not None:
        value = [{"role": speaker, "content": value}]
    if not isinstance(value, list):
        raise ValueError(
            f'{name}: expected a list of messages, as in {{"{name}": [...]}}, got {_brief(value)}'
        )
    return [_message(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _says_who_speaks(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item)


def _message(name: str, message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and message.get("role") is None and "from" in message:
        speaker = message["from"]
        if speaker not in list(_SPEAKERS):
            known = ", ".join(_SPEAKERS)
            raise ValueError(
                f"{name}.from: expected one of {known}, got {_brief(speaker)}; rename it"
            )
        message = {"role": _SPEAKERS[speaker], "content": message.get("value")}
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{name}: expected {{"role", "content"}}, got {_brief(message)}')
    content, calls = message.get("content"), message.get("tool_calls")
    _check_objects(f"{name}.tool_calls", calls)
    if isinstance(content, list):
        content = "".join(_text_of_part(f"{name}.content", part) for part in content)
    elif content is None and not calls:
        raise ValueError(f"{name}: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ValueError(f"{name}.content: expected a string, got {_brief(content)}")
    # A Parquet struct has every key in every message; templates expect absent keys to be absent.
    return {k: v for k, v in (message | {"content": content}).items() if v is not None}


def _text_of_part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text parts only, got {_brief(part)}")
    return text


def _check_objects(name: str, value: Any) -> None:
    """Refuse what is neither ``None`` nor a list of JSON objects."""
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name}: expected a list of objects, got {_brief(value)}")


def _log_probs(name: str, value: Any) -> list[float] | None:
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
            return json.loads(value)
    return value


# The start of a value in an error, however large or deep the value is.
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def _brief(value: Any) -> str:
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
