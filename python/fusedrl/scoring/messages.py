"""The messages of a conversation, checked one by one."""

from __future__ import annotations

import json
from reprlib import Repr
from typing import Any

from fusedrl.scoring.errors import ChatError

# Who speaks, in the words of ShareGPT and in those of chat templates.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


def messages_of(
    where: str, name: str, value: Any, speaker: str | None = None
) -> list[dict[str, Any]]:
    """Check a list of messages, which may be written as JSON.

    Args:
        where: ``file:line``, for errors.
        name: the key that has the value, for errors.
        value: messages with ``role`` and ``content``, or with ``from`` and ``value`` as ShareGPT
            has them.
        speaker: the role of a plain string; ``None`` refuses one.

    Raises:
        ChatError: a message is not one.
    """
    value = decoded(value)
    if isinstance(value, str) and speaker is not None:
        value = [{"role": speaker, "content": value}]
    if not isinstance(value, list):
        string = "" if speaker is None else ", or a string"
        raise ChatError(
            where,
            f'{name}: expected a list of messages{string}, as in {{"{name}": [...]}}, '
            f"got {brief(value)}",
        )
    return [_message(where, f"{name}[{i}]", message) for i, message in enumerate(value)]


def decoded(value: Any) -> Any:
    """The messages that a string holds as JSON, and any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if looks_like_messages(found) else value


def looks_like_messages(value: Any) -> bool:
    """Whether a value is a list of objects that say who speaks."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value)
    )


def _message(where: str, name: str, message: Any) -> dict[str, Any]:
    if isinstance(message, dict) and message.get("role") is None and "from" in message:
        message = _of_sharegpt(where, name, message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatError(where, f'{name}: expected {{"role", "content"}}, got {brief(message)}')
    content, calls = message.get("content"), message.get("tool_calls")
    check_objects(where, f"{name}.tool_calls", calls)
    if isinstance(content, list):
        content = _text_of_parts(where, f"{name}.content", content)
    elif content is None and not calls:
        raise ChatError(where, f"{name}: no content and no tool_calls")
    elif not isinstance(content, str | None):
        raise ChatError(where, f"{name}.content: expected a string, got {brief(content)}")
    for key, text in (("role", message["role"]), ("content", content or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ChatError(where, f"{name}.{key}: not valid Unicode: {error}") from error
    # A Parquet struct has every key in every message; templates expect absent keys to be absent.
    kept = {key: value for key, value in message.items() if value is not None}
    return kept if content is None else kept | {"content": content}


def _of_sharegpt(where: str, name: str, message: dict[str, Any]) -> dict[str, Any]:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise ChatError(
            where,
            f"{name}.from: expected one of {', '.join(SPEAKERS)}, got {brief(speaker)}; rename it",
        )
    return {"role": SPEAKERS[speaker], "content": message.get("value")}


def _text_of_parts(where: str, name: str, parts: list[Any]) -> str:
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    for part, text in zip(parts, texts, strict=True):
        if not isinstance(text, str):
            raise ChatError(where, f"{name}: expected text parts only, got {brief(part)}")
    return "".join(text for text in texts if text is not None)


def check_objects(where: str, name: str, value: Any) -> None:
    """Refuse what is neither ``None`` nor a list of JSON objects."""
    items = [] if value is None else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ChatError(where, f"{name}: expected a list of objects, got {brief(value)}")


# The start of a value in an error, however large or deep the value is.
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60
_REPR.maxlevel = 3


def brief(value: Any) -> str:
    """The start of a value, for an error."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
