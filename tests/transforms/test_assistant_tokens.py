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


def test_the_template_that_torchrl_chooses_gives_the_same(policy, tokenizer):
    """For a tokenizer without markers, which the score would render in its own way."""
    messages = CHATS["system"]
    batch = RetrieveLogProb(policy()).read(data_of(messages))
    expected = scored(messages, tokenizer, _CHAT_TEMPLATES["chatml_format"])
    assert batch.tokens.tolist() == expected.token_ids
    assert batch.mask.tolist() == [turn >= 0 for turn in expected.turns]
    assert words(expected) == "bd"


def test_what_the_user_says_first_is_not_the_assistants(policy, tokenizer):
    """torchrl finds the content in the text, where it stands first."""
    template = without_markers(CHATML)
    messages = CHATS["the user says it first"]
    assert words(scored(messages, tokenizer, template)) == "4<|im_end|>"
    batch = RetrieveLogProb(policy(chat_template=template)).read(data_of(messages))
    ids = batch.tokens[batch.mask].tolist()
    assert tokenizer.decode(ids) == "4<|im_end|>" and ids[-1] == batch.tokens[-2]


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


@pytest.mark.parametrize("option", ["continue_final_message", "sanitize_control_tokens"])
def test_arguments_that_go_with_no_mask_are_refused(policy, option):
    transform = RetrieveLogProb(policy(), tokenizer_kwargs={option: True})
    with pytest.raises(ValueError, match=f"tokenizer_kwargs: expected {option} not to be set"):
        transform.read(data_of(CHATS["one turn"]))


def test_a_tokenizer_that_tells_no_characters_is_refused(policy, tokenizer):
    class Slow:
        is_fast = False
        chat_template = None

    transform = RetrieveLogProb(policy(), tokenizer=Slow())
    with pytest.raises(ValueError, match=r"tokenizer: expected a fast tokenizer.*got Slow"):
        transform.read(data_of(CHATS["one turn"]))


def test_variables_of_the_template_reach_every_rendering(policy, tokenizer):
    template = without_markers(CHATML).replace(
        "message.content +", "message.content + (tail or '') +"
    )
    messages = CHATS["system"]
    wrapper = policy(chat_template=template)
    plain = RetrieveLogProb(wrapper).read(data_of(messages))
    assert tokenizer.decode(plain.tokens[plain.mask]) == "b<|im_end|>d<|im_end|>"
    mask = _marked(RetrieveLogProb(wrapper), messages, tail="!")
    assert int(mask.sum()) == int(plain.mask.sum()) + 2


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


def test_an_error_of_the_template_is_its_own(policy):
    template = "{{ raise_exception('roles must alternate') }}"
    transform = RetrieveLogProb(policy(chat_template=template))
    with pytest.raises(Exception, match=r"^roles must alternate"):
        transform.read(data_of(CHATS["one turn"]))


def test_every_offset_is_covered():
    """A space that a tokenizer leaves out is the next token's, padding spells nothing."""
    from fusedrl.assistant_tokens import Span, covering, tokens_in

    offsets = torch.tensor([[0, 2], [3, 4], [3, 4], [5, 7]])
    assert covering(offsets).tolist() == [[0, 2], [2, 4], [3, 4], [4, 7]]
    assert tokens_in([Span(0, 1), Span(2, 3), Span(4, 5)], offsets).tolist() == [-1, 1, -1, 2]
    assert tokens_in([Span(3, 4)], offsets).tolist() == [-1, 0, 0, -1]
    assert tokens_in([Span(4, 4)], offsets).tolist() == [-1, -1, -1, -1]
    assert tokens_in([], offsets[:0]).tolist() == []
