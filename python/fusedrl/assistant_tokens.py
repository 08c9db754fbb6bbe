"""Find the tokens that the assistant had to emit: the only definition in this package.

They are the tokens that the model produces when it is given the conversation up to a turn and the
generation prompt. A chat template with ``{% generation %}`` markers says which text that is. For
any other template, rendering the conversation turn by turn shows it: the content of a turn and the
special token that ends it (``<|im_end|>``, ``<|eot_id|>``, ...), without the line break that a
template puts after that.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

Message = Mapping[str, Any]
_PROBE = "fusedrl"  # said in the place of a turn, to see its header

REASONING = ("reasoning_content", "reasoning", "thinking")  # a message's, beside its content

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Transformers has one compiled template for all threads, which notes the markers of one rendering.
_rendering = threading.Lock()


def _renew() -> None:
    """In a forked child, whose parent may have been rendering in another thread."""
    global _rendering
    _rendering = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Unknown(ValueError):
    """The assistant's text cannot be told from the rest of a conversation."""


class Refused(Exception):
    """A chat template raised its ``__cause__`` for the first ``count`` messages."""

    def __init__(self, count: int, cause: Exception) -> None:
        super().__init__(f"the chat template refuses the first {count} messages: {cause!r}")
        self.count = count


class Span(NamedTuple):
    """Characters of a rendered conversation."""

    start: int
    end: int


@dataclass(frozen=True)
class Renderer:
    """Renders conversations as text.

    Args:
        tokenizer: a tokenizer of transformers.
        template: a Jinja chat template; ``None`` for the tokenizer's own.
        variables: what the template gets beside the messages, such as ``tools``.
    """

    tokenizer: Any
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The text of ``messages``, with or without a generation prompt after them.

        Raises:
            Refused: the template raised an error.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=prompt,
                **self.variables,
            )
        except Exception as error:  # a template is a program, and may raise any error
            raise Refused(len(messages), error) from error

    def marks(self) -> bool:
        """Whether the template has generation markers."""
        return _MARKER.search(self._source()) is not None

    def marked(self, messages: Sequence[Message]) -> list[Span]:
        """The text that the markers of the template enclose, block by block.

        Raises:
            Refused: the template raised an error.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        present = [{k: v for k, v in m.items() if v is not None} for m in messages]
        variables: dict[str, Any] = {**self.tokenizer.special_tokens_map, **self.variables}
        try:
            with _rendering:
                rendered: Any = render_jinja_template(
                    conversations=[present],
                    chat_template=self._source(),
                    return_assistant_tokens_mask=True,
                    **variables,
                )
        except Exception as error:
            raise Refused(len(messages), error) from error
        return [Span(start, end) for start, end in rendered[1][0]]

    def _source(self) -> str:
        return self.tokenizer.get_chat_template(self.template, self.variables.get("tools"))


def assistant_spans(
    renderer: Renderer, messages: Sequence[Message], text: str | None = None
) -> list[Span]:
    """The assistant's characters in the rendered ``messages``.

    Args:
        renderer: renders the messages.
        messages: the conversation.
        text: the rendered conversation, where it is known already.

    Returns:
        The blocks that the template marks; without markers, a span for each turn of the assistant.

    Raises:
        Unknown: the template has no markers, and the assistant's turns cannot be told apart.
        Refused: the template raised an error for the first messages of the conversation.
    """
    if renderer.marks():
        return renderer.marked(messages)
    text = renderer.text(messages) if text is None else text
    return [
        _derived(renderer, messages, turn, text)
        for turn, message in enumerate(messages)
        if message["role"] == "assistant"
    ]


def tokens_in(spans: Sequence[Span], offsets: Tensor) -> Tensor:
    """The number of the span that each token spells a part of, -1 where there is none.

    Where several tokens spell one character, each of them spells a part of its span. The first
    token of a conversation belongs to no span, as nothing before it could predict it.

    Args:
        spans: characters of a text.
        offsets: int ``[T, 2]``, the characters of each token, as a fast tokenizer returns them.

    Returns:
        int64 ``[T]``.

    Example:
        >>> import torch
        >>> from fusedrl.assistant_tokens import Span, tokens_in
        >>> tokens_in([Span(6, 9)], torch.tensor([[0, 4], [4, 6], [6, 8], [8, 9]]))
        tensor([-1, -1,  0,  0])
    """
    first, last = covering(offsets).unbind(1)
    # White space without a token may end a span, and the next token spells none of that.
    first = torch.where(offsets[:, 0] < offsets[:, 1], offsets[:, 0], first)
    found = torch.full_like(last, -1)
    for number, (start, end) in enumerate(spans):
        if start < end:
            found[(first < end) & (last > start)] = number
    found[:1] = -1
    return found


def covering(offsets: Tensor) -> Tensor:
    """Offsets ``[T, 2]`` without gaps, because some tokenizers leave out leading white space."""
    last = offsets[:, 1].cummax(0).values
    reached = torch.cat((last.new_zeros(1), last))[:-1]
    return torch.stack((torch.minimum(offsets[:, 0], reached), last), 1)


def _derived(renderer: Renderer, messages: Sequence[Message], turn: int, text: str) -> Span:
    """Where message ``turn`` is in ``text``, found by what it adds to the messages before it."""
    where = f"messages[{turn}]"
    if turn == 0:
        raise Unknown(f"{where}: no message prompts the first turn")
    before = messages[:turn]
    prompt, rendered = renderer.text(before, prompt=True), renderer.text(messages[: turn + 1])
    if not rendered.startswith(prompt):
        raise Unknown(
            f"{where}: the chat template renders this turn without its generation prompt, which "
            f"ends in {prompt[-24:]!r}, so where the turn begins is not known"
        )
    said, message = rendered[len(prompt) :], messages[turn]
    alone, content = renderer.text(before), _text_of(message.get("content"))
    decoder = renderer.tokenizer.added_tokens_decoder
    specials = [str(token) for token in decoder.values() if token.special]
    body = _without_end(said, content, specials)
    # What may be before the content of a turn that is the last: a block for reasoning, empty here.
    first = next((_name_of(call) for call in message.get("tool_calls") or ()), "")
    most = body.rfind(content) if content or not first else body.find(first)
    if any(message.get(key) for key in REASONING):
        most = 0
    opening = _opening(prompt, alone, specials)
    span = _place(text, prompt, opening, said, body, max(most, 0), specials)
    if span is None:
        raise Unknown(
            f"{where}: the chat template renders this turn differently once later messages follow, "
            "so its tokens cannot be found"
        )
    is_said = span.start < span.end
    if is_said and prompt == alone and _header(renderer, prompt, messages, turn) != "":
        raise Unknown(
            f"{where}: the chat template ignores add_generation_prompt and does not open the turn "
            "with what is said, so where its header ends is not known"
        )
    return span


def _header(renderer: Renderer, prompt: str, messages: Sequence[Message], turn: int) -> str | None:
    """What stands behind ``prompt`` before a turn's content, if the template tells."""
    for fields in ({"role": "assistant"}, messages[turn]):  # it may need what else a turn has
        with suppress(Refused):
            text = renderer.text([*messages[:turn], {**fields, "content": _PROBE}])
            header, found, _ = text[len(prompt) :].partition(_PROBE)
            if found:
                return header.strip()
    return None


def _text_of(content: Any) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(p if isinstance(p, str) else p.get("text") or "" for p in content)
    return (content or "").strip()


def _opening(prompt: str, alone: str, specials: Sequence[str]) -> str:
    """What a generation prompt adds to the conversation ``alone``, in whole special tokens."""
    begin = len(_alike(prompt, alone))
    last = ((s, prompt.rfind(s, 0, begin + len(s) - 1)) for s in specials)
    return prompt[min((at for s, at in last if 0 <= at < begin < at + len(s)), default=begin) :]


def _without_end(said: str, content: str, specials: Sequence[str]) -> str:
    """A turn without the special tokens behind its content, or without the last if it has none."""
    kept = content if content in said else ""  # which may itself end in such tokens
    body, ended = said, said.rstrip()
    while found := next((s for s in specials if ended.endswith(s)), None):
        shorter = ended.removesuffix(found)
        if kept not in shorter:
            break
        body, ended = shorter, shorter.rstrip()
        if not content:
            break
    return body


def _name_of(call: Mapping[str, Any]) -> str:
    return call.get("function", call).get("name") or ""


def _place(
    text: str, prompt: str, opening: str, said: str, body: str, most: int, specials: Sequence[str]
) -> Span | None:
    """Where ``text`` has the ``body`` of what was said, with what ends it.

    Where later messages follow, some templates leave out how they open the last turn: the end of
    the ``opening``, which is in the prompt, or up to ``most`` characters of the body.
    """
    ending = said[len(body) :]
    is_ended = any(special in ending for special in specials)
    for start in range(len(prompt), len(prompt) - len(opening) - 1, -1):
        if text.startswith(prompt[:start]):
            for left_out in range(most + 1):
                if text.startswith(body[left_out:], start):
                    end = start + len(body) - left_out
                    closing = _closing(ending, text[end:], opening, specials)
                    if closing or not is_ended:
                        return Span(start, end + len(closing))
    return None


def _alike(one: str, other: str) -> str:
    """What both begin with."""
    if other.startswith(one) or one.startswith(other):
        return min(one, other, key=len)
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _closing(ending: str, rest: str, opening: str, specials: Sequence[str]) -> str:
    """What ends a turn in the text, where the turn alone has ``ending``: to its last special token.

    The last turn may end in another token than the others, which is then the first of ``rest``.
    """
    shared = _alike(ending, rest)
    if not any(special in ending for special in specials):
        return shared
    ends = [shared[: shared.rfind(s) + len(s)] for s in specials if s in shared]
    ends += [s for s in specials if rest.startswith(s) and s not in opening]
    return max(ends, key=len, default="")
