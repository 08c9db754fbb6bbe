"""Convert messages and tools of any data set to the form that chat templates expect."""

from __future__ import annotations

import re
from contextlib import suppress
from reprlib import Repr
from typing import Any, NamedTuple

from fusedrl.scoring.records import parsed

Messages = list[dict[str, Any]]

# Role names of data sets -> roles of chat templates.
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
}
# A list of messages that is truncated, or written by Python's repr: not JSON.
_NOT_JSON_LIST = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
# Keys that exclude a message from training if they are 0 or false.
_WEIGHTS = ("weight", "train", "loss_mask")


class Turn(NamedTuple):
    """A message, and whether it is scored if it is the assistant's."""

    message: dict[str, Any]
    scored: bool = True


def messages_of(name: str, value: Any, role: str | None = None) -> list[Turn]:
    """Messages from a list or its JSON; a plain string is one message of ``role``."""
    found = [value] if _is_message(value) else value_of(value)
    if found and isinstance(found, list) and all(map(_is_message, found)):
        value = found
    elif isinstance(value, str) and _NOT_JSON_LIST.match(value):
        raise ValueError(
            f"{name}: expected a list of messages, got text that is not JSON: {brief(value)}; "
            "write the list with json.dumps, or the table as Parquet"
        )
    if isinstance(value, str) and role is not None:
        value = [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(
            f'{name}: expected a list of messages, as in {{"{name}": [...]}}, or a string with a '
            f'"prompt", got {brief(value)}'
        )
    return [turn_of(f"{name}[{i}]", message) for i, message in enumerate(value)]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and ("role" in item or item.keys() >= {"from", "value"})


def turn_of(name: str, given: Any) -> Turn:
    """A message in the form of chat templates."""
    # Parquet structs fill missing keys with null, which templates would not treat as missing.
    message = _without_nulls(given)
    if isinstance(message, dict) and "role" not in message and "from" in message:
        message = _from_sharegpt(name, message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f'{name}: expected {{"role", "content"}}, got {brief(given)}')
    if message["role"] == "function":  # OpenAI's former name
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
        raise ValueError(f"{name}: expected content or tool_calls, got neither")
    elif not isinstance(content, str | None):
        raise ValueError(f"{name}.content: expected a string, got {brief(content)}")
    return Turn(message, all(weights))


def _from_sharegpt(name: str, message: dict[str, Any]) -> dict[str, Any]:
    role, value = message.pop("from"), message.pop("value", None)
    if role not in list(_ROLES):
        known = ", ".join(_ROLES)
        raise ValueError(f"{name}.from: expected one of {known}, got {brief(role)}; rename it")
    if role != "function_call":
        return {**message, "role": _ROLES[role], "content": value}
    calls = value_of(value)
    calls = calls if isinstance(calls, list) else [calls]
    return {**message, "role": _ROLES[role], "tool_calls": calls}


def _call(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call in the form of chat templates; its arguments may still be a JSON string."""
    function = call.get("function", call)
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        bare = function.keys() <= {"name", "type", "id"}  # a function without arguments
        arguments = function.get("arguments", {} if bare else None)
        if isinstance(arguments_of(arguments), dict):
            outer = call if "function" in call else {}
            called = {**function, "arguments": arguments}
            return {"type": "function", **outer, "function": called}
    raise ValueError(
        f"{name}: expected a name and arguments (an object or JSON), got {brief(call)}; correct "
        "the call, or leave out the row"
    )


def arguments_of(value: Any) -> Any:
    """The arguments of a tool call, parsed if they are a JSON string."""
    return {} if value == "" else value_of(value)


def _text_of_part(name: str, part: Any) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text parts only, got {brief(part)}")
    return text


def tools_of(tools: Any, functions: Any) -> list[Any] | None:
    """The tools of a chat, each as ``{"type": "function", "function": ...}``."""
    tools = _list_of("tools", value_of(tools)) or _list_of("functions", value_of(functions))
    tools = [
        {"type": "function", "function": tool}
        if "name" in tool and "function" not in tool
        else tool
        for tool in tools
    ]
    return _without_nulls(tools) or None


def _list_of(name: str, value: Any) -> list[Any]:
    """A list of JSON objects, empty for a missing value."""
    value = value or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{name}: expected a list of objects, got {brief(value)}")
    return value


def _without_nulls(value: Any) -> Any:
    """``value`` without null keys, which Arrow adds if any other row has them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_without_nulls, value)] if isinstance(value, list) else value


def value_of(value: Any) -> Any:
    """The parsed value of a JSON string, or the value unchanged."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return parsed(value)
    return value


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def brief(value: Any) -> str:
    """A short representation of a value of any size, for errors."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
