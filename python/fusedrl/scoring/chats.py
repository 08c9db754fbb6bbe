"""Conversations from records of any shape, each checked before anything is computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
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


class _Shape(NamedTuple):
    """A kind of rows: the keys that they have, and which of these are answers to which prompt."""

    keys: tuple[str, ...]
    answers: tuple[str, ...]
    prompt: Callable[[dict[str, Any]], Any]


def _prompt(row: dict[str, Any]) -> Any:
    return _alpaca(row) if row.get("prompt") is None else row["prompt"]


def _alpaca(row: dict[str, Any]) -> Any:
    """What was asked before and at last, ``None`` in a row that has no instruction."""
    if row.get("instruction") is None:
        return None
    turns = []
    for pair in _json(row.get("history")) or ():
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"history: expected pairs of question and answer, got {_brief(pair)}")
        roles = zip(("user", "assistant"), pair, strict=True)
        turns += [{"role": role, "content": text} for role, text in roles]
    parts = [part for part in (row["instruction"], row.get("input")) if part]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"instruction, input: expected strings, got {_brief(parts)}")
    return [*turns, {"role": "user", "content": "\n".join(parts)}]


def _input(row: dict[str, Any]) -> Any:
    asked = _json(row["input"])
    if not isinstance(asked, dict) or "messages" not in asked:
        raise ValueError(f'input: expected {{"messages": [...]}}, got {_brief(asked)}')
    return asked["messages"]


# The first that fits holds.
_SHAPES = (
    _Shape(
        ("input", "preferred_output", "non_preferred_output"),
        ("preferred_output", "non_preferred_output"),
        _input,
    ),
    _Shape(("chosen", "rejected"), ("chosen", "rejected"), _prompt),
    _Shape(("messages",), ("messages",), lambda row: None),
    _Shape(("conversations",), ("conversations",), lambda row: None),
    _Shape(("prompt", "completion"), ("completion",), _prompt),
    _Shape(("instruction", "output"), ("output",), _alpaca),
)


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
            keys = " and ".join(map(repr, _shape(record.read()).keys))
            both = ", whose answers are both scored" if len(chats) > 1 else ""
            return Survey(len(records.rows) * len(chats), f"{record.format} with {keys}{both}")
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
    except RecursionError as error:
        raise ChatError(record.where, reason(error)) from error


def _chats(record: Record, row: Any) -> list[Chat]:
    """The chats of a row; a ``ValueError`` says what is wrong of it."""
    shape = _shape(row)
    asked = shape.prompt(row)
    prompt = None if asked is None else _unscored(_messages("prompt", asked, "user"))
    said = [_conversation(row, key, prompt, len(shape.answers)) for key in shape.answers]
    if prompt is None and len(said) > 1:
        shared = _shared(*said)
        said = [_unscored(turns[:shared]) + turns[shared:] for turns in said]
    tools, log_probs = _tools(row), _log_probs("rollout_log_probs", row.get("rollout_log_probs"))
    if log_probs is not None and len(said) > 1:
        raise ValueError(
            "rollout_log_probs: expected none beside two answers, got a list; write each answer as "
            "a row of its own"
        )
    answers = ("chosen", "rejected") if len(said) > 1 else (None,)
    chats = []
    for key, answer, turns in zip(shape.answers, answers, said, strict=True):
        _check_assistant(key, turns)
        messages = [turn.message for turn in turns]
        context = frozenset(i for i, turn in enumerate(turns) if not turn.scored)
        place = record.file, record.line
        chats.append(Chat(*place, messages, tools, log_probs, context, answer))
    return chats


def _unscored(turns: Sequence[_Turn]) -> list[_Turn]:
    return [turn._replace(scored=False) for turn in turns]


def _shared(chosen: list[_Turn], rejected: list[_Turn]) -> int:
    """How many messages two conversations begin with alike, besides the last of each."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return len([*takewhile(lambda pair: _same(*pair), pairs)])


def _shape(row: Any) -> _Shape:
    for shape in _SHAPES:
        if isinstance(row, dict) and all(row.get(key) is not None for key in shape.keys):
            return shape
    raise ValueError(
        'expected {"messages": [...]}, {"conversations": [...]}, {"prompt", "completion"}, '
        '{"instruction", "output"} or {"chosen", "rejected"}, with or without a "prompt", '
        f"got {_brief(row)}; rename its keys"
    )


def _conversation(
    row: dict[str, Any], key: str, prompt: list[_Turn] | None, answers: int
) -> list[_Turn]:
    """The conversation under a key of a row, with its prompt and its system message."""
    turns = _messages(key, row[key], None if prompt is None else "assistant")
    if prompt is not None:
        begins = len(turns) >= len(prompt) and all(map(_same, turns, prompt))
        if not begins and turns and turns[0].message["role"] in ("user", "system"):
            whole = '"messages"' if answers == 1 else '"chosen" and "rejected" without a prompt'
            raise ValueError(
                f"{key}: expected what follows the prompt, or the whole conversation with the "
                f"prompt first, got a conversation that begins with {_brief(turns[0].message)}; "
                f"write whole conversations as {whole}"
            )
        turns = prompt + turns[len(prompt) if begins else 0 :]
    system = row.get("system")
    begins = bool(turns) and turns[0].message["role"] == "system"
    if begins or not isinstance(system, str) or not system:
        return turns
    return [_Turn({"role": "system", "content": system}), *turns]


def _same(one: _Turn, other: _Turn) -> bool:
    keys = ("role", "content", "tool_calls")
    return all(one.message.get(key) == other.message.get(key) for key in keys)


def _check_assistant(name: str, turns: Sequence[_Turn]) -> None:
    roles = [turn.message["role"] for turn in turns if turn.scored]
    if "assistant" not in roles:
        raise ValueError(
            f"{name}: no assistant turn: the roles are {_brief(list(dict.fromkeys(roles)))}, and "
            "only what an assistant said is scored"
        )


def _messages(name: str, value: Any, speaker: str | None = None) -> list[_Turn]:
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
    return [_turn(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _says_who_speaks(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or "from" in item)


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
    if not all(isinstance(weight, int | float) for weight in weights):
        raise ValueError(f"{name}: {', '.join(_WEIGHTS)}: expected 0 or 1, got {_brief(weights)}")
    if "function_call" in message:
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    _check_calls(f"{name}.tool_calls", message)
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
    functions = calls if isinstance(calls, list) else [calls]
    calls = [{"type": "function", "function": function} for function in functions]
    return {**message, "role": _SPEAKERS[speaker], "tool_calls": calls}


def _check_calls(name: str, message: dict[str, Any]) -> None:
    """Refuse calls that no template can render; an empty list is left out."""
    calls = message.get("tool_calls")
    _check_objects(name, calls)
    if not calls:
        message.pop("tool_calls", None)
    for i, call in enumerate(calls or ()):
        called = call.get("function", call)
        arguments = called.get("arguments", {}) if isinstance(called, dict) else called
        if not isinstance(arguments_of(arguments), dict):
            raise ValueError(
                f"{name}[{i}]: expected a name and arguments, which are an object or its JSON, "
                f"got {_brief(call)}; correct the call, or leave out the row"
            )


def arguments_of(value: Any) -> Any:
    """The arguments of a tool call as an object, where they are written as JSON."""
    return {} if value == "" else _json(value)


def _text_of_part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text parts only, got {_brief(part)}")
    return text


def _tools(row: dict[str, Any]) -> list[Any] | None:
    """What the assistant could call, where OpenAI and others write it."""
    asked = _json(row.get("input"))
    given = [row.get("tools"), asked.get("tools") if isinstance(asked, dict) else None]
    tools = next(filter(None, map(_json, given)), None)
    if tools is None and (functions := _json(row.get("functions"))):
        _check_objects("functions", functions)
        tools = [{"type": "function", "function": function} for function in functions]
    _check_objects("tools", tools)
    return _without_nulls(tools)


def _check_objects(name: str, value: Any) -> None:
    """Refuse what is neither ``None`` nor a list of JSON objects."""
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name}: expected a list of objects, got {_brief(value)}")


def _without_nulls(value: Any) -> Any:
    """``value`` without keys that are null, which Arrow gives to a row because another has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def _log_probs(name: str, value: Any) -> list[float] | None:
    value = _json(value)
    if value is None or value == "":  # as in a column of CSV
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
