"""Render and tokenise a conversation, and find the turn of each scored token.

:mod:`fusedrl.assistant_tokens` finds the assistant's text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import count, pairwise, product
from typing import Any, NamedTuple

import torch
from transformers import BatchEncoding, PreTrainedTokenizerBase

from fusedrl.assistant_tokens import (
    REASONING,
    Refused,
    Renderer,
    Span,
    Unknown,
    assistant_spans,
    covering,
    tokens_in,
)
from fusedrl.scoring.chats import Chat
from fusedrl.scoring.errors import ChatError, reason
from fusedrl.scoring.messages import Messages, arguments_of

REMEDY = "pass --chat-template FILE, a copy of the template with {% generation %} markers"

# A unique word that replaces a text, to find where a template renders the text.
_PROBE = "fusedrl_probe_{}."


class TokenizedChat(NamedTuple):
    """A chat as the models read it.

    ``texts[i]`` is the text of token *i*; the joined texts are the rendered conversation. If
    several tokens spell a character, the first one has it and the others have ``""``. ``turns[i]``
    is the index of the message for which token *i* is scored, or -1. ``rollout`` has the engine's
    log-prob of each scored token, NaN if missing, or is ``None`` without rollout log-probs.
    ``not_rendered`` names the parts of the context that the chat template does not render, such as
    ``"tools"`` and ``"system messages"``.
    """

    chat: Chat
    token_ids: list[int]
    texts: list[str]
    turns: list[int]
    rollout: list[float] | None = None
    not_rendered: frozenset[str] = frozenset()


def tokenize_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    context: int | None = None,
    variables: Mapping[str, Any] | None = None,
) -> TokenizedChat:
    """Render and tokenise a chat, and find the tokens to score.

    Args:
        chat: the conversation.
        tokenizer: a fast tokenizer with a chat template.
        template: a Jinja chat template that replaces the tokenizer's template.
        context: maximum number of tokens of a chat; ``None`` for no limit.
        variables: further variables of the template.

    Raises:
        ChatError: the chat is too long, cannot be rendered or tokenised, its assistant turns cannot
            be determined, or its rollout log-probs belong to other tokens.
    """
    tools = {"tools": chat.tools} if chat.tools else {}
    renderer = Renderer(tokenizer, template, {**(variables or {}), **tools})
    try:
        return _tokenized(*_rendered(chat, renderer), renderer, context)
    except Unknown as error:
        raise ChatError(chat.where, f"{error}; {REMEDY}") from error
    except Refused as error:
        cause = reason(error.__cause__ or error)
        raise ChatError(
            chat.where,
            f"the chat template refuses the first {error.count} of {len(chat.messages)} messages: "
            f"{cause}; correct the chat, or pass --chat-template FILE, a template that accepts it",
        ) from error


def _rendered(chat: Chat, renderer: Renderer) -> tuple[Chat, str]:
    """The chat with its tool calls in the form that the template accepts, and the rendered text.

    Arguments are objects for most templates, and JSON strings for templates that refuse objects or
    render them with Python's ``str``. A message with only calls has no content, or an empty one for
    templates that require it.
    """
    refusals: list[Refused] = []
    for messages in _candidate_forms(chat.messages):
        try:
            text = renderer.text(messages)
        except Refused as error:
            refusals.append(error)
            continue
        if not _is_written_by_python(messages, text):
            return chat._replace(messages=messages), text
    raise refusals[0]


def _candidate_forms(messages: Messages) -> list[Messages]:
    if not any("tool_calls" in message for message in messages):
        return [messages]
    return [
        [
            {**content, **m, "tool_calls": _changed(m["tool_calls"], arguments)}
            if "tool_calls" in m
            else m
            for m in messages
        ]
        for arguments, content in product((_with_object, _with_text), ({}, {"content": ""}))
    ]


def _changed(calls: list[dict[str, Any]], change: Callable[[Any], Any]) -> list[dict[str, Any]]:
    return [{**call, "function": change(call["function"])} for call in calls]


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    return {**function, "arguments": arguments_of(function["arguments"])}


def _with_text(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": text}


def _is_written_by_python(messages: Messages, text: str) -> bool:
    """Whether the text contains an arguments object in Python syntax instead of JSON."""
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    objects = [call["arguments"] for call in calls if isinstance(call["arguments"], dict)]
    return any(str(given) in text for given in objects if given)


def _check_text_rendered(chat: Chat, text: str, spans: list[Span], turns: list[int]) -> None:
    """Raise if the template does not render all text of the assistant, apart from white space."""
    for turn in {*turns} - chat.context:
        found = [text[s.start : s.end] for s, of in zip(spans, turns, strict=True) if of == turn]
        rendered = "".join("".join(found).split())
        for key in ("content", *REASONING):
            given = chat.messages[turn].get(key)
            if isinstance(given, str) and "".join(given.split()) not in rendered:
                _raise_not_rendered(chat, turn, key)


def _check_calls_rendered(chat: Chat, renderer: Renderer) -> None:
    """Raise if the template does not render, or does not mark, a tool call."""
    probes = map(_PROBE.format, count())
    probed = [
        m | {"tool_calls": _changed(m["tool_calls"], lambda f: {**f, "name": next(probes)})}
        if "tool_calls" in m
        else m
        for m in chat.messages
    ]
    text = renderer.text(probed)
    if renderer.marks():
        text = "".join(text[span.start : span.end] for span in renderer.marked(probed))
    for turn, message in enumerate(probed):
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if not all(name in text for name in names):
            _raise_not_rendered(chat, turn, "tool_calls")


def _raise_not_rendered(chat: Chat, turn: int, key: str) -> None:
    raise ChatError(
        chat.where,
        f"messages[{turn}]: the chat template does not render all of its {key}, or does not mark "
        "it, so that it would not be scored; pass a corrected template as --chat-template FILE",
    )


def _tokenized(chat: Chat, text: str, renderer: Renderer, context: int | None) -> TokenizedChat:
    encoded = _encoded(chat, text, renderer.tokenizer)
    length = len(encoded["input_ids"])
    if context is not None and length > context:
        raise ChatError(
            chat.where,
            f"expected at most {context} tokens, the models' context length, got {length}; shorten "
            "or split the chat, or pass --context N if the models support more",
        )
    if any("tool_calls" in message for message in chat.messages):
        _check_calls_rendered(chat, renderer)
    offsets = torch.tensor(encoded["offset_mapping"], dtype=torch.int64).view(-1, 2)
    ends = [0, *covering(offsets)[:, 1].tolist()]
    spans = assistant_spans(renderer, chat.messages, text)
    turns = _turns(chat, renderer, spans)
    _check_text_rendered(chat, text, spans, turns)
    turns = [-1 if turn in chat.context else turn for turn in turns]
    turn_of = [turns[n] if n >= 0 else -1 for n in tokens_in(spans, offsets).tolist()]
    if all(turn < 0 for turn in turn_of):
        raise ChatError(chat.where, "no tokens to score: the template renders no assistant text")
    texts = [text[start:end] for start, end in pairwise(ends)]
    made = TokenizedChat(chat, encoded["input_ids"], texts, turn_of, _rollout(chat, turn_of))
    return made._replace(not_rendered=_unrendered_context(chat, renderer, {*turn_of}))


def _unrendered_context(chat: Chat, renderer: Renderer, scored: set[int]) -> frozenset[str]:
    """The parts of the context that the template does not render, found by probes in the text."""
    probes: dict[str, str] = {}

    def probe(part: str) -> str:
        probes[word := _PROBE.format(len(probes))] = part
        return word

    def probed(tool: Any) -> Any:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            return tool
        named = {**function, "name": probe("tools")}
        return {**tool, "function": named} if "function" in tool else named

    messages = [
        m
        if turn in scored or not m.get("content")
        else m | {"content": probe(f"{m['role']} messages")}
        for turn, m in enumerate(chat.messages)
    ]
    variables = {**renderer.variables}
    if isinstance(tools := variables.get("tools"), list):
        variables["tools"] = [*map(probed, tools)]
    with suppress(Refused):
        text = replace(renderer, variables=variables).text(messages)
        return frozenset(part for word, part in probes.items() if word not in text)
    return frozenset()


def _rollout(chat: Chat, turn_of: list[int]) -> list[float] | None:
    """The rollout log-probs of the scored tokens, from a list for these or for all tokens."""
    given = chat.rollout_log_probs
    scored = [i for i, turn in enumerate(turn_of) if turn >= 0]
    if given is None or len(given) == len(scored):
        return given
    if len(given) == len(turn_of):
        return [given[i] for i in scored]
    raise ChatError(
        chat.where,
        f"rollout_log_probs: expected {len(scored)} values for the scored tokens, or "
        f"{len(turn_of)} for all tokens of the chat, got {len(given)}; use the tokenizer and chat "
        "template of the rollout",
    )


def _turns(chat: Chat, renderer: Renderer, spans: list[Span]) -> list[int]:
    """The index of the message of each span."""
    assistant_turns = [i for i, m in enumerate(chat.messages) if m["role"] == "assistant"]
    if len(spans) == len(assistant_turns):
        return assistant_turns
    turns: list[int] = []
    for i in assistant_turns:  # a turn may have several marked blocks, such as reasoning and answer
        before = renderer.marked(chat.messages[:i]) if i else []
        known = renderer.marked(chat.messages[: i + 1])
        if len(before) != len(turns) or known != spans[: len(known)]:
            break
        turns += [i] * (len(known) - len(before))
    if len(turns) != len(spans):
        raise ChatError(
            chat.where,
            f"the chat template marks {len(spans)} blocks for {len(assistant_turns)} assistant "
            "turns; put one {% generation %} ... {% endgeneration %} around the text of each "
            "turn",
        )
    return turns


def _encoded(chat: Chat, text: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    try:
        text.encode()  # may contain surrogates of the input, such as in names and tool calls
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except UnicodeEncodeError as error:
        raise ChatError(chat.where, f"the rendered chat is not valid Unicode: {error}") from error
    except Exception as error:  # tokenizers raises plain Exception
        raise ChatError(chat.where, f"the tokenizer failed on the chat: {reason(error)}") from error
