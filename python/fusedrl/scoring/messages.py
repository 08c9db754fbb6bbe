"""Messages and tools in the words of chat templates, whatever a data set calls them."""

from __future__ import annotations

import re
from contextlib import suppress
from reprlib import Repr
from typing import Any, NamedTuple

from fusedrl.scoring.records import parsed

Messages = list[dict[str, Any]]

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


class Turn(NamedTuple):
    """A message, and whether it is scored if the assistant said it."""

    message: dict[str, Any]
    scored: bool = True


def messages_of(name: str, value: Any, speaker: str | None = None) -> list[Turn]:
    """A list of messages, which may be written as JSON; a string is what ``speaker`` says."""
    found = [value] if _says_who_speaks(value) else value_of(value)
    if found and isinstance(found, list) and all(map(_says_who_speaks, found)):
        value = found
    elif isinstance(value, str) and _OTHER_LIST.match(value):
        raise ValueError(
            f"{name}: expected a list of messages, got text that is no JSON: {brief(value)}; "
            "write the list with json.dumps, or the table as Parquet"
        )
    if isinstance(value, str) and speaker is not None:
        value = [{"role": speaker, "content": value}]
    if not isinstance(value, list):
        raise ValueError(
            f'{name}: expected a list of messages, as in {{"{name}": [...]}}, or a text and a '
            f'"prompt" beside it, got {brief(value)}'
        )
    return [turn_of(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _says_who_speaks(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or item.keys() >= {"from", "value"})


def turn_of(name: str, given: Any) -> Turn:
    """A message in the words of chat templates."""
    # A Parquet struct has every key in every message; templates expect absent keys to be absent.
    message = _without_nulls(given)
    if isinstance(message, dict) and "role" not in message and "from" in message:
        message = _from_sharegpt(name, message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{name}: expected {{"role", "content"}}, got {brief(given)}')
    if message["role"] == "function":  # OpenAI's first name for it
        message["role"] = "tool"
    weights = [message.pop(key) for key in _WEIGHTS if key in message]
    if not all(weight in (0, 1) for weight in weights):
        raise ValueError(f"{name}: {', '.join(_WEIGHTS)}: expected 0 or 1, got {brief(weights)}")
    calls, older = (value_of(message.pop(key, None)) for key in ("tool_calls", "function_call"))
    if calls := _list_of(f"{name}.tool_calls", calls or (older and [{"function": older}])):
        message["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", c) for i, c in enumerate(calls)]
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = "".join(_text_of_part(f"{name}.content", part) for part in content)
    elif content is None and "tool_calls" not in message:
        raise ValueError(f"{name}: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ValueError(f"{name}.content: expected a string, got {brief(content)}")
    return Turn(message, all(weights))


def _from_sharegpt(name: str, message: dict[str, Any]) -> dict[str, Any]:
    speaker, value = message.pop("from"), message.pop("value", None)
    if speaker not in list(_SPEAKERS):
        known = ", ".join(_SPEAKERS)
        raise ValueError(f"{name}.from: expected one of {known}, got {brief(speaker)}; rename it")
    if speaker != "function_call":
        return {**message, "role": _SPEAKERS[speaker], "content": value}
    calls = value_of(value)
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
        f"{brief(call)}; correct the call, or leave out the row"
    )


def arguments_of(value: Any) -> Any:
    """The arguments of a tool call as an object, where they are written as JSON."""
    return {} if value == "" else value_of(value)


def _text_of_part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text parts only, got {brief(part)}")
    return text


def tools_of(tools: Any, functions: Any) -> list[Any] | None:
    """What the assistant could call, each as ``{"type": "function", "function": ...}``."""
    tools = _list_of("tools", value_of(tools)) or _list_of("functions", value_of(functions))
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
        raise ValueError(f"{name}: expected a list of objects, got {brief(value)}")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without keys that are null, which Arrow gives to a row because another has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def value_of(value: Any) -> Any:
    """What a string holds as JSON, or the value as it is."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return parsed(value)
    return value


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def brief(value: Any) -> str:
    """The start of a value in an error, however large or deep the value is."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
