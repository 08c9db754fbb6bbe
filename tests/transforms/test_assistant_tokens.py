"""The transforms and ``fusedrl score`` count the same tokens, by one definition."""

from __future__ import annotations

from typing import Any

import pytest
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

from .dialogs import rows

pytest.importorskip("pyarrow", reason='needs pip install "fusedrl[score]"')

from fusedrl.scoring.chats import Chat
from fusedrl.scoring.errors import ChatError
from fusedrl.scoring.tokenization import TokenizedChat, tokenize_chat

Messages = list[dict[str, str]]


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
    return tokenize_chat(Chat("chats.jsonl:1", 1, messages, None), tokenizer, template)


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
        if "no token to score" in str(error):
            assert not transform.read(data_of(messages)).mask.any()
        else:
            with pytest.raises(ValueError, match=r"history: .*got messages\[\d\]: "):
                transform.read(data_of(messages))
        return
    batch = transform.read(data_of(messages))
    assert batch.tokens.tolist() == expected.token_ids
    assert batch.mask.tolist() == [turn >= 0 for turn in expected.turns]


@pytest.mark.parametrize("name", ["chatml, marked", "chatml, unmarked", "trim, unmarked"])
def test_the_kl_is_of_the_tokens_that_score_counts(policy, reference, tokenizer, name):
    template = TEMPLATES[name]
    transform = RetrieveKL(*(make(chat_template=template) for make in (policy, reference)))
    for messages in (CHATS["the user says it first"], CHATS["system"]):
        (kl,) = rows(transform(data_of(messages)), "kl_penalty")
        expected = scored(messages, tokenizer, template).turns
        assert (kl != 0).tolist() == [turn >= 0 for turn in expected]


def test_a_character_of_several_tokens_counts_to_its_end(policy, tokenizer):
    """transformers marks the first of them alone where a block ends with it."""
    messages = chat(("user", "a"), ("assistant", "ok \U0001f9ff"))
    batch = RetrieveLogProb(policy()).read(data_of(messages))
    assert tokenizer.decode(batch.tokens[batch.mask]) == "ok \U0001f9ff"


def test_tokens_that_are_cut_off_and_padding_are_not_counted(policy, tokenizer):
    messages = CHATS["system"]
    template = without_markers(CHATML)
    whole = scored(messages, tokenizer, template)
    transform = RetrieveLogProb(policy(chat_template=template))
    for side in ("left", "right"):
        padded = _marked(transform, messages, padding="max_length", max_length=60, side=side)
        assert padded.sum() == sum(turn >= 0 for turn in whole.turns) < len(padded) == 60
    last = max(i for i, turn in enumerate(whole.turns) if turn >= 0)
    cut = _marked(transform, messages, truncation=True, max_length=last)
    assert cut.tolist() == [turn >= 0 for turn in whole.turns[:last]] and cut.any()


def _marked(transform: RetrieveLogProb, messages: Messages, side: str = "left", **kwargs: Any):
    from fusedrl.transforms.reading import marks

    options = {"chat_template": transform.model.chat_template}
    kwargs = kwargs | {"tokenizer_kwargs": {"padding_side": side}}
    history = data_of(messages)["history"].full
    (marked,) = marks(history, transform.model.tokenizer, options, kwargs).unbind(0)
    return marked["assistant_masks"].bool()


def test_turns_in_several_blocks_are_told_apart(tokenizer):
    """torchrl's template for Qwen marks what a turn says and each call of a tool."""
    call = {"name": "add", "arguments": {"a": 1}}
    messages: list[Any] = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "I add.", "tool_calls": [call, call]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    found = scored(messages, tokenizer, _CHAT_TEMPLATES["qwen"])
    text = dict.fromkeys(found.turns, "")
    for turn, part in zip(found.turns, found.texts, strict=True):
        text[turn] += part
    assert text[1].startswith("I add.") and text[1].count('"arguments": {"a": 1}}') == 2
    assert text[3] == "2" and set(text) == {-1, 1, 3}
