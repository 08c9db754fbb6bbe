"""From a conversation to tokens, and which of them the assistant had to emit.

A scored token is one that the model produces when it is given the conversation up to that turn and
the generation prompt: the turn's content and the special token that ends it (``<|im_end|>``,
``<|eot_id|>``, ...), without the line break that a template puts after that. A chat template with
``{% generation %}`` markers decides itself; for any other, the spans follow from rendering the
conversation turn by turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fusedrl.scoring.chats import Chat
from fusedrl.scoring.errors import ChatError, reason

REMEDY = "pass --chat-template FILE, a copy of the template with {% generation %} markers"
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TokenizedChat(NamedTuple):
    """A chat as the models read it.

    ``texts[i]`` is what token *i* adds to the rendered conversation: a character that several
    tokens spell belongs to the first, the others have ``""``, so the texts join to the whole.
    ``turns[i]`` is the index of the message that token *i* is scored for, -1 where it is not.
    """

    chat: Chat
    token_ids: list[int]
    texts: list[str]
    turns: list[int]


class Span(NamedTuple):
    """What the assistant said in message ``turn``: characters of the rendered conversation."""

    turn: int
    start: int
    end: int


def tokenize_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    template: str | None = None,
    context: int | None = None,
) -> TokenizedChat:
    """Render and tokenise a chat, and find the tokens to score.

    Args:
        chat: the conversation.
        tokenizer: a fast tokenizer with a chat template.
        template: a Jinja chat template that replaces the tokenizer's own.
        context: the most tokens that a chat may have; ``None`` for any number.

    Raises:
        ChatError: a chat that is too long, that the template or the tokenizer refuses, or whose
            assistant turns cannot be told apart.
    """
    render = _renderer(chat, tokenizer, template)
    text = render(chat.messages)
    encoded = _encoded(chat, text, tokenizer)
    if context is not None and len(encoded["input_ids"]) > context:
        raise ChatError(
            chat.where,
            f"expected at most {context} tokens, the models' context, got "
            f"{len(encoded['input_ids'])}; shorten or split the chat, or pass --context N if the "
            "models reach further",
        )
    tiles = _tiles(encoded["offset_mapping"])
    ends = [0, *(end for _, end in tiles)]
    texts = [text[start:end] for start, end in pairwise(ends)]
    if _MARKER.search(tokenizer.get_chat_template(template, chat.tools)):
        spans = _marked_spans(chat, tokenizer, template)
    else:
        spans = _derived_spans(chat, text, tokenizer, render)
    turns = [-1] * len(tiles)
    for turn, start, end in spans:
        for i, (first, last) in enumerate(tiles):
            if start < end and first < end and last > start:
                turns[i] = turn
    if turns:
        turns[0] = -1  # Nothing comes before it that could predict it.
    if all(turn < 0 for turn in turns):
        raise ChatError(chat.where, "no token to score: the template renders no assistant text")
    return TokenizedChat(chat, encoded["input_ids"], texts, turns)


def _renderer(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> Callable[..., str]:
    def render(messages: list[dict[str, Any]], **options: Any) -> str:
        with _refusals(chat, messages):
            return tokenizer.apply_chat_template(  # pyright: ignore[reportReturnType]
                messages, tools=chat.tools, chat_template=template, tokenize=False, **options
            )

    return render


@contextmanager
def _refusals(chat: Chat, messages: list[dict[str, Any]]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # A template is a program: it raises what it likes.
        raise ChatError(
            chat.where,
            f"the chat template refuses the first {len(messages)} of {len(chat.messages)} "
            f"messages: {reason(error)}; {REMEDY}",
        ) from error


def _encoded(chat: Chat, text: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    try:
        text.encode()  # What a template adds, such as names and tool calls, is text of the input.
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except UnicodeEncodeError as error:
        raise ChatError(chat.where, f"the rendered chat is not valid Unicode: {error}") from error
    except Exception as error:  # Tokenizers raise Exception itself.
        raise ChatError(chat.where, f"the tokenizer refuses the chat: {reason(error)}") from error


def _tiles(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets without gaps: some tokenizers report a token without its leading white space."""
    tiles, reached = [], 0
    for start, end in offsets:
        tiles.append((min(start, reached), max(end, reached)))
        reached = tiles[-1][1]
    return tiles


def _marked_spans(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, template: str | None
) -> list[Span]:
    special_tokens: dict[str, Any] = tokenizer.special_tokens_map
    with _refusals(chat, chat.messages):
        rendered: Any = render_jinja_template(
            conversations=[chat.messages],
            tools=chat.tools,
            chat_template=tokenizer.get_chat_template(template, chat.tools),
            return_assistant_tokens_mask=True,
            **special_tokens,
        )
    blocks: list[list[int]] = []
    for start, end in rendered[1][0]:
        if blocks and blocks[-1][1] == start:  # A turn in two blocks, reasoning and answer.
            blocks[-1][1] = end
        else:
            blocks.append([start, end])
    spoken = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(blocks) != len(spoken):
        raise ChatError(
            chat.where,
            f"the chat template marks {len(blocks)} generations for {len(spoken)} assistant turns; "
            "put one {% generation %} ... {% endgeneration %} around what each turn generates",
        )
    return [Span(turn, *block) for turn, block in zip(spoken, blocks, strict=True)]


def _derived_spans(
    chat: Chat, text: str, tokenizer: PreTrainedTokenizerBase, render: Callable[..., str]
) -> list[Span]:
    specials = [str(t) for t in tokenizer.added_tokens_decoder.values() if t.special]
    spans = []
    for i, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        where = f"messages[{i}]"
        if i == 0:
            raise ChatError(chat.where, f"{where}: no message prompts the first turn; {REMEDY}")
        prompt = render(chat.messages[:i], add_generation_prompt=True)
        turn = render(chat.messages[: i + 1])
        said = _said(prompt, turn, text, message.get("content", "").strip())
        if said is None:
            raise ChatError(
                chat.where,
                f"{where}: the chat template renders this turn differently once later messages "
                f"follow, so its tokens cannot be found; {REMEDY}",
            )
        closing = max((said.rfind(s) + len(s) for s in specials if s in said), default=len(said))
        if not said[closing:].strip():
            said = said[:closing]
        # Behind a generation prompt, a special token is the first that the model has to emit.
        opens = any(said != s and said.startswith(s) for s in specials)
        if opens and prompt == render(chat.messages[:i]):
            raise ChatError(
                chat.where,
                f"{where}: the chat template ignores add_generation_prompt and the turn opens with "
                f"a special token, so where its header ends is not known; {REMEDY}",
            )
        spans.append(Span(i, len(prompt), len(prompt) + len(said)))
    return spans


def _said(prompt: str, turn: str, text: str, content: str) -> str | None:
    """What ``turn`` adds to ``prompt``, as far as the whole ``text`` still has it there.

    Some templates open only the last turn with an empty reasoning block; what was said is then the
    turn without it. ``None`` where more than that differs.
    """
    if not (turn.startswith(prompt) and text.startswith(prompt)):
        return None
    said, rest = turn[len(prompt) :], text[len(prompt) :]
    last = max(said.rfind(content), 0) if content else 0
    return next((said[k:] for k in range(last + 1) if rest.startswith(said[k:])), None)
