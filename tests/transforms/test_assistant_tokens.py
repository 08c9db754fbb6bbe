"""The transforms and ``fusedrl score`` count the same tokens, by one definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chat_templates import (
    BRACKETS,
    CHANNEL,
    CHATML,
    HEADERLESS_PROMPT,
    REASONING,
    TRIMMED,
    with_markers,
    without_markers,
)
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History
from torchrl.data.llm.history import _CHAT_TEMPLATES
from torchrl.modules.llm.policies import ChatHistory

from fusedrl import RetrieveKL, RetrieveLogProb
from fusedrl.assistant_tokens import Span, tokens_in

from .dialogs import rows

pytest.importorskip("pyarrow", reason='needs pip install "fusedrl[score]"')

from fusedrl.scoring.chats import Chat
from fusedrl.scoring.errors import ChatError
from fusedrl.scoring.tokenization import TokenizedChat, tokenize_chat

Messages = list[dict[str, Any]]


def chat(*messages: tuple[str, str]) -> Messages:
    return [{"role": role, "content": content} for role, content in messages]


CHATS = {
    "one turn": chat(("user", "2 + 2?"), ("assistant", "It is 4.")),
    "system": chat(
        ("system", "Be kind."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")
    ),
    "the user says it first": chat(("user", "Say 4."), ("assistant", "4")),
    "empty turn": chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "fine")),
    "only an empty turn": chat(("user", "a"), ("assistant", "")),
    "tool": chat(
        ("user", "2 + 2?"), ("assistant", "add(2, 2)"), ("tool", "4"), ("assistant", "It is 4.")
    ),
    "tokens that are parts of a character": chat(
        ("user", "Smile"),
        ("assistant", "ok \U0001f9ff"),
        ("user", "\U0001f9ff"),
        ("assistant", "y"),
    ),
    "the user has the last word": chat(("user", "a"), ("assistant", "b"), ("user", "c")),
    "white space": chat(("user", "a"), ("assistant", "b\n\n"), ("user", "c"), ("assistant", " d ")),
    "the assistant speaks first": chat(("assistant", "Hi"), ("user", "x"), ("assistant", "y")),
    "two turns in a row": chat(("user", "a"), ("assistant", "b"), ("assistant", "b")),
}
TEMPLATES = {
    "chatml": CHATML,
    "trim": TRIMMED,
    "inst": BRACKETS,
    "channel": CHANNEL,
}
TEMPLATES = {
    **{f"{name}, marked": with_markers(template) for name, template in TEMPLATES.items()},
    **{f"{name}, unmarked": without_markers(template) for name, template in TEMPLATES.items()},
    "a turn changes when others follow": REASONING,
    "no generation prompt": HEADERLESS_PROMPT,
    **{f"torchrl's {name}": template for name, template in _CHAT_TEMPLATES.items()},
}


def data_of(messages: Messages) -> TensorDict:
    history = lazy_stack([History.from_chats([messages])[0]])
    return TensorDict(history=ChatHistory(full=history), batch_size=(1,))


def scored(messages: Messages, tokenizer: Any, template: str | None) -> TokenizedChat:
    return tokenize_chat(Chat("chats.jsonl", 1, messages, None), tokenizer, template)


def words(tokenized: TokenizedChat) -> str:
    pairs = zip(tokenized.turns, tokenized.texts, strict=True)
    return "".join(text for turn, text in pairs if turn >= 0)


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_score_and_the_transforms_count_the_same_tokens(policy, tokenizer, template, messages):
    transform = RetrieveLogProb(policy(chat_template=template))
    try:
        expected = scored(messages, tokenizer, template)
    except ChatError as error:
        if "no tokens to score" in str(error):
            assert not transform.read(data_of(messages)).mask.any()
        else:
            with pytest.raises(ValueError, match=r"history: .*got messages\[\d\]: "):
                transform.read(data_of(messages))
        return
    batch = transform.read(data_of(messages))
    assert batch.tokens.tolist() == expected.token_ids
    assert batch.mask.tolist() == [turn >= 0 for turn in expected.turns]


def test_content_may_be_in_parts(policy):
    """As the templates of models with images have it."""
    joined = "(message.content | map(attribute='text') | join)"
    template = without_markers(CHATML).replace("message.content", joined)
    turn = CHATS["one turn"]
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in turn]
    whole, split = (
        RetrieveLogProb(policy(chat_template=made)).read(data_of(chat))
        for made, chat in ((without_markers(CHATML), turn), (template, parts))
    )
    assert whole.tokens.tolist() == split.tokens.tolist()
    assert whole.mask.tolist() == split.mask.tolist()


def test_white_space_without_a_token_leaves_the_next_token_to_the_user():
    """As a tokenizer of words leaves it out, at the end of a marked block."""
    answer, header = (0, 4), (6, 10)
    found = tokens_in([Span(0, 6)], torch.tensor([(0, 0), answer, header]))
    assert found.tolist() == [-1, 0, -1]


@pytest.mark.parametrize("name", ["chatml, marked", "chatml, unmarked", "trim, unmarked"])
def test_the_kl_is_of_the_tokens_that_score_counts(policy, reference, tokenizer, name):
    template = TEMPLATES[name]
    transform = RetrieveKL(*(make(chat_template=template) for make in (policy, reference)))
    for messages in (CHATS["the user says it first"], CHATS["system"]):
        (kl,) = rows(transform(data_of(messages)), "kl_penalty")
        expected = scored(messages, tokenizer, template).turns
        assert (kl != 0).tolist() == [turn >= 0 for turn in expected]
