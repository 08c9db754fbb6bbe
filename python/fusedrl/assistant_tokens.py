"""Find the tokens of the assistant in a conversation: the only definition in this package.

They are the tokens that the model generates after the conversation up to a turn and the generation
prompt. A chat template may mark that text with ``{% generation %}``. For any other template it is
found by rendering the conversation turn by turn: the content of a turn and the special token that
ends it (``<|im_end|>``, ``<|eot_id|>``, ...), without the line break that follows in the template.
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
_PROBE = "fusedrl"  # replaces the content of a turn, to find its header

REASONING = ("reasoning_content", "reasoning", "thinking")  # next to a message's content

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# All threads share the compiled template of transformers, which records the markers as it renders.
_rendering = threading.Lock()


def _renew() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _rendering
    _rendering = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


class Unknown(ValueError):
    """The text of the assistant cannot be found in a conversation."""


class Refused(Exception):
    """A chat template raised ``__cause__`` for the first ``count`` messages."""

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
        variables: more variables of the template, such as ``tools``.
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
        """The blocks of text between the generation markers of the template.

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
    """The spans of the assistant's text in the rendered ``messages``.

    Args:
        renderer: renders the messages.
        messages: the conversation.
        text: the rendered conversation, if the caller has it.

    Returns:
        The blocks that the template marks; without markers, one span per turn of the assistant.

    Raises:
        Unknown: the template has no markers, and the assistant's turns cannot be located.
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
    """The index of the span that each token belongs to, -1 for none.

    If several tokens encode one character, all of them belong to its span. The first token of a
    conversation belongs to no span, as no token before it predicts it.

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
    # A span may end in white space without a token, to which the next token does not belong.
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
    """The span of message ``turn`` in ``text``, found by rendering with and without the turn."""
    where = f"messages[{turn}]"
    if turn == 0:
        raise Unknown(f"{where}: no message prompts the first turn")
    before = messages[:turn]
    prompt, rendered = renderer.text(before, prompt=True), renderer.text(messages[: turn + 1])
    if not rendered.startswith(prompt):
        raise Unknown(
            f"{where}: the chat template renders this turn without its generation prompt, which "
            f"ends in {prompt[-24:]!r}, so the start of the turn is unknown"
        )
    generated, message = rendered[len(prompt) :], messages[turn]
    alone, content = renderer.text(before), _text_of(message.get("content"))
    decoder = renderer.tokenizer.added_tokens_decoder
    specials = [str(token) for token in decoder.values() if token.special]
    body = _without_end(generated, content, specials)
    # Only the last turn may have a block for reasoning before its content, which is empty here.
    first = next((_name_of(call) for call in message.get("tool_calls") or ()), "")
    most = body.rfind(content) if content or not first else body.find(first)
    if any(message.get(key) for key in REASONING):
        most = 0
    opening = _opening(prompt, alone, specials)
    span = _locate(text, prompt, opening, generated, body, max(most, 0), specials)
    if span is None:
        raise Unknown(
            f"{where}: the chat template renders this turn differently once later messages follow, "
            "so its tokens cannot be found"
        )
    has_text = span.start < span.end
    if has_text and prompt == alone and _header(renderer, prompt, messages, turn) != "":
        raise Unknown(
            f"{where}: the chat template ignores add_generation_prompt and does not open the turn "
            "with its content, so the end of its header is unknown"
        )
    return span


def _header(renderer: Renderer, prompt: str, messages: Sequence[Message], turn: int) -> str | None:
    """The text between ``prompt`` and the content of a turn; ``None`` if it cannot be found."""
    for fields in ({"role": "assistant"}, messages[turn]):  # the template may need more fields
        with suppress(Refused):
            text = renderer.text([*messages[:turn], {**fields, "content": _PROBE}])
            header, found, _ = text[len(prompt) :].partition(_PROBE)
            if found:
                return header.strip()
    return None


def _text_of(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "".join(p if isinstance(p, str) else p.get("text") or "" for p in content)
    return (content or "").strip()


def _opening(prompt: str, alone: str, specials: Sequence[str]) -> str:
    """The text that a generation prompt adds to ``alone``, from the start of a special token."""
    begin = len(_common_prefix(prompt, alone))
    last = ((s, prompt.rfind(s, 0, begin + len(s) - 1)) for s in specials)
    return prompt[min((at for s, at in last if 0 <= at < begin < at + len(s)), default=begin) :]


def _without_end(generated: str, content: str, specials: Sequence[str]) -> str:
    """A turn without the special tokens after its content, or without the last if it has none."""
    kept = content if content in generated else ""  # content may end in special tokens too
    body, ended = generated, generated.rstrip()
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


def _locate(
    text: str,
    prompt: str,
    opening: str,
    generated: str,
    body: str,
    most: int,
    specials: Sequence[str],
) -> Span | None:
    """The span in ``text`` of a turn's ``body`` and the special tokens that end the turn.

    If later messages follow, some templates omit what they open the last turn with: the end of the
    ``opening``, which is part of the prompt, or up to ``most`` characters of the body.
    """
    ending = generated[len(body) :]
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


def _common_prefix(one: str, other: str) -> str:
    if other.startswith(one) or one.startswith(other):
        return min(one, other, key=len)
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _closing(ending: str, rest: str, opening: str, specials: Sequence[str]) -> str:
    """The end of a turn in the text, up to its last special token.

    It may differ from ``ending``, that of the turn rendered last: the last turn may end in another
    special token, while ``rest`` begins with the one of earlier turns.
    """
    shared = _common_prefix(ending, rest)
    if not any(special in ending for special in specials):
        return shared
    ends = [shared[: shared.rfind(s) + len(s)] for s in specials if s in shared]
    ends += [s for s in specials if rest.startswith(s) and s not in opening]
    return max(ends, key=len, default="")
