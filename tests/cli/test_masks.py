"""Which tokens are scored: with generation markers, and derived from templates without them."""

from __future__ import annotations

import pytest
from chat_templates import (
    BEHIND,
    BRACKETS,
    CHANNEL,
    CHATML,
    HEADERLESS_PROMPT,
    OTHER_END,
    PROMPTED,
    REASONING,
    TRIMMED,
    with_markers,
    without_markers,
)

pytest.importorskip("transformers")

from pathlib import Path

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as bpe
from transformers import PreTrainedTokenizerFast

from fusedrl.demo import CHATS
from fusedrl.demo.models import make_tokenizer
from fusedrl.scoring.chats import Chat, parse_chats
from fusedrl.scoring.errors import ChatError
from fusedrl.scoring.records import read_records
from fusedrl.scoring.tokenization import tokenize_chat


def make_chat(*messages):
    return Chat("chats.jsonl", 7, [{"role": r, "content": c} for r, c in messages], None)


def bundled():
    return [chat for record in read_records(CHATS).rows for chat in parse_chats(record)]


def said(tokenized):
    """The scored text of each turn."""
    turns: dict[int, str] = {}
    for turn, text in zip(tokenized.turns, tokenized.texts, strict=True):
        if turn >= 0:
            turns[turn] = turns.get(turn, "") + text
    return turns


def byte_level(texts, **options):
    tokenizer = Tokenizer(bpe.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, **options)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=alphabet,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )


@pytest.fixture(scope="module", params=["byte-level", "trimmed offsets", "byte fallback"])
def tokenizer(request):
    texts = [message["content"] for chat in bundled() for message in chat.messages]
    if request.param == "byte fallback":
        tokenizer = Tokenizer(bpe.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
        trainer = trainers.BpeTrainer(
            vocab_size=800,
            limit_alphabet=90,
            special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        )
    else:
        tokenizer, trainer = byte_level(texts)
    tokenizer.train_from_iterator(texts, trainer)
    if request.param == "trimmed offsets":
        from tokenizers import processors

        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )


@pytest.mark.parametrize(
    "template",
    [CHATML, TRIMMED, BRACKETS, CHANNEL],
    ids=["chatml", "trim", "inst", "channel"],
)
def test_markers_and_derivation_agree(tokenizer, template):
    for chat in bundled():
        if template is BRACKETS:
            chat = chat._replace(messages=[m for m in chat.messages if m["role"] != "system"])
        derived = tokenize_chat(chat, tokenizer, without_markers(template))
        marked = tokenize_chat(chat, tokenizer, with_markers(template))
        assert derived == marked
        strip = str.strip if template is TRIMMED else str
        lead = {BRACKETS: " ", CHANNEL: "<|endoftext|>final\n"}.get(template, "")
        assert said(derived) == {
            turn: lead + strip(message["content"]) + "<|im_end|>"
            for turn, message in enumerate(chat.messages)
            if message["role"] == "assistant"
        }


def test_texts_join_to_the_rendered_conversation(tokenizer):
    tokenizer.chat_template = without_markers(CHATML)
    for chat in bundled():
        tokenized = tokenize_chat(chat, tokenizer)
        rendered = tokenizer.apply_chat_template(chat.messages, tokenize=False)
        assert "".join(tokenized.texts) == rendered
        assert tokenized.token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_a_character_of_several_tokens_belongs_to_the_first(tokenizer):
    chat = make_chat(("user", "Smile!"), ("assistant", "\U0001f9ff\U0001f9ff"))
    tokenized = tokenize_chat(
        chat, tokenizer, with_markers(CHATML).replace("+ '<|im_end|>' }}{%- e", "}}{%- e")
    )
    texts = [t for turn, t in zip(tokenized.turns, tokenized.texts, strict=True) if turn == 1]
    assert "".join(texts) == "\U0001f9ff\U0001f9ff"
    assert texts.count("") == len(texts) - 2 >= 2


def test_an_empty_reasoning_block_in_the_last_turn_only(tokenizer):
    chat = make_chat(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    turns = said(tokenize_chat(chat, tokenizer, REASONING))
    assert turns == {1: "b<|im_end|>", 3: "<think>\n\n</think>\n\nd<|im_end|>"}
    empty = make_chat(("user", "a"), ("assistant", ""), ("user", "c"), ("assistant", "d"))
    assert said(tokenize_chat(empty, tokenizer, REASONING)) == turns | {1: "<|im_end|>"}


TWO = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
LAST = {
    "a prompt with a block": (PROMPTED, {1: "b<|im_end|>", 3: "d<|im_end|>"}),
    "an end of its own": (
        OTHER_END,
        {1: "<|endoftext|>final\nb<|im_end|>", 3: "<|endoftext|>final\nd<|endoftext|>"},
    ),
    "a token behind all": (BEHIND, {1: "b<|im_end|>", 3: "d<|im_end|>\n<|endoftext|>"}),
}


@pytest.mark.parametrize("name", LAST)
@pytest.mark.parametrize("first", ["b", "b \n", "", "  ", "\n", "<", "<<", "<|im_end|>", "think>"])
def test_a_template_may_render_the_last_turn_in_its_own_way(tokenizer, name, first):
    template, expected = LAST[name]
    chat = make_chat(("user", "a"), ("assistant", first), *TWO[2:])
    try:
        tokenized = tokenize_chat(chat, tokenizer, without_markers(template))
    except ChatError:
        assert template is BEHIND and not first.strip()  # which tokens end a turn is not known
        return
    assert said(tokenized) == {1: expected[1].replace("b", first), 3: expected[3]}


def test_reasoning_beside_the_content_is_not_left_out(tokenizer):
    template = REASONING.replace("<think>\\n\\n", "<think>\\n' + (message.reasoning or '') + '\\n")
    chat = make_chat(*TWO)
    assert said(tokenize_chat(chat, tokenizer, template))[1] == "b<|im_end|>"
    chat.messages[1]["reasoning"] = "hm"
    with pytest.raises(ChatError, match=r"messages\[1\]: the chat template renders this turn diff"):
        tokenize_chat(chat, tokenizer, template)


SPLIT = CHATML.replace("message.content + '<|im", "message.content.split('</think>')[-1] + '<|im")


@pytest.mark.parametrize("render", [without_markers, with_markers])
@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_reasoning_that_a_template_leaves_out_is_missed(tokenizer, render, key):
    chat = make_chat(*TWO)
    chat.messages[3][key] = "<think>hm</think>d"
    with pytest.raises(ChatError, match=rf"messages\[3\]: .* does not render all of its {key}"):
        tokenize_chat(chat, tokenizer, render(SPLIT))
    whole = "{%- set said = (message.reasoning_content or '') + message.content -%}GENERATION"
    keeps = CHATML.replace("GENERATION{{ message.content", whole + "{{ said")
    assert "hm</think>d" in said(tokenize_chat(chat, tokenizer, render(keeps)))[3]
    chat = chat._replace(context=frozenset([3]))
    assert list(said(tokenize_chat(chat, tokenizer, render(SPLIT)))) == [1]


# Templates of TRL, several turns of which are rendered otherwise than one.
REAL = {
    "qwen3": ("b<|im_end|>", "<think>\n\n</think>\n\nd<|im_end|>"),
    "qwen3_5_think": ("b<|im_end|>", "\n</think>\n\nd<|im_end|>"),
    "qwen3_5_nothink": ("b<|im_end|>", "d<|im_end|>"),
    "qwen3_6": ("b<|im_end|>", "\n</think>\n\nd<|im_end|>"),
    "gptoss": ("<|channel|>final<|message|>b<|end|>", "<|channel|>final<|message|>d<|return|>"),
    "phi3": ("b<|end|>", "d<|end|>\n<|endoftext|>"),
}


@pytest.mark.parametrize("name", REAL)
def test_several_turns_of_a_real_template(name):
    trl = pytest.importorskip("trl")
    file = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if not file.exists():
        pytest.skip(f"this TRL has no template of {name}")
    tokenizer = make_tokenizer([""], size=0)
    special = ["<|im_start|>", "<|im_end|>", "<|end|>", "<|return|>", "<|endoftext|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.eos_token = "<|endoftext|>"
    tokenized = tokenize_chat(make_chat(*TWO), tokenizer, file.read_text())
    assert said(tokenized) == dict(zip((1, 3), REAL[name], strict=True))


def test_a_template_gets_variables(tokenizer):
    for template in (without_markers(CHATML), with_markers(CHATML)):
        template = "{{ 'slow ' if slow else 'fast ' }}" + template
        given = [
            "".join(tokenize_chat(make_chat(*TWO), tokenizer, template, variables=variables).texts)
            for variables in (None, {"slow": True})
        ]
        assert given[0].removeprefix("fast ") == given[1].removeprefix("slow ")


PLAIN = "{%- for m in messages -%}{{ m.role | upper + ': ' + m.content + '\\n' }}{%- endfor -%}"
USERS = "{%- for m in messages if m.role == 'user' -%}{{ m.content }}{%- endfor -%}"
THOUGHTS = [("assistant", "<think>hm</think>b"), ("user", "c"), ("assistant", "d")]
MARKED_END = "{{ message.content }}{%- generation -%}{{ '<|im_end|>' }}{%- endgeneration -%}"
REFUSED = {
    "reasoning that is dropped": (REASONING, THOUGHTS, r"messages\[1\].*--chat-template FILE"),
    "no generation prompt": (HEADERLESS_PROMPT, [("assistant", "b")], "ignores add_generation_pr"),
    "a header in plain text": (PLAIN, [("assistant", "b")], "ignores add_generation_prompt"),
    "a header in plain text alone": (PLAIN, [("assistant", "")], "ignores add_generation_prompt"),
    "a header that is said": (PLAIN, [("assistant", "ASSISTANT")], "ignores add_generation_prompt"),
    "a prompt that opens a thought": (
        without_markers(CHATML).replace("assistant\n'", "assistant\n<think>\n'"),
        [("assistant", "b")],
        "without its generation prompt, which ends in .*<think>",
    ),
    "a refusal": ("{{ raise_exception('alternate') }}", [("assistant", "b")], "alternate"),
    "markers around users": (
        with_markers(CHATML).replace("== 'assistant'", "in ('assistant', 'user')"),
        [("user", "b"), ("assistant", "c")],
        "marks 3 blocks for 1 assistant turns",
    ),
    "markers around the end alone": (
        CHATML.replace("GENERATION{{ message.content + '<|im_end|>' }}END", MARKED_END),
        [("assistant", "b")],
        "does not render all of its content",
    ),
    "no assistant": (USERS, [("assistant", "b")], "does not render all of its content"),
    "no assistant who says nothing": (USERS, [("assistant", "")], "no tokens to score"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_does_not_tell_the_turns_is_an_error(tokenizer, name):
    template, answers, message = REFUSED[name]
    with pytest.raises(ChatError, match=f"chats.jsonl:7: .*{message}"):
        tokenize_chat(make_chat(("user", "a"), *answers), tokenizer, template)


@pytest.mark.parametrize(
    "content", ["<|im_end|>", "<|im_start|>x", "<|endoftext|> y", "a<|im_end|>"]
)
@pytest.mark.parametrize("template", [CHATML, CHANNEL], ids=["chatml", "channel"])
def test_content_may_start_with_a_special_token(tokenizer, template, content):
    chat = make_chat(("user", "a"), ("assistant", content), ("user", "<|im_start|>assistant\nb"))
    derived = tokenize_chat(chat, tokenizer, without_markers(template))
    assert derived == tokenize_chat(chat, tokenizer, with_markers(template))
    lead = "<|endoftext|>final\n" if template is CHANNEL else ""
    assert said(derived) == {1: f"{lead}{content}<|im_end|>"}


def test_a_chat_longer_than_the_context_is_refused_before_its_turns_are_looked_at(tokenizer):
    chat = make_chat(("user", "a"), ("assistant", "b"))
    length = len(tokenize_chat(chat, tokenizer, without_markers(CHATML)).token_ids)
    tokenize_chat(chat, tokenizer, without_markers(CHATML), context=length)
    with pytest.raises(ChatError, match=f"at most {length - 1} tokens.*got {length}"):
        tokenize_chat(chat, tokenizer, HEADERLESS_PROMPT, context=length - 1)


def test_an_assistant_that_speaks_first_needs_markers(tokenizer):
    chat = make_chat(("assistant", "Hi"), ("user", "Hi"), ("assistant", "Bye"))
    with pytest.raises(ChatError, match=r"messages\[0\].*--chat-template FILE"):
        tokenize_chat(chat, tokenizer, without_markers(CHATML))
    turns = said(tokenize_chat(chat, tokenizer, with_markers(CHATML)))
    assert turns == {0: "Hi<|im_end|>", 2: "Bye<|im_end|>"}


def test_the_first_token_of_a_chat_is_never_scored(tokenizer):
    template = (
        "{%- for m in messages -%}"
        "{%- generation -%}{{ m.content }}{%- endgeneration -%}"
        "{%- endfor -%}"
    )
    tokenized = tokenize_chat(make_chat(("assistant", "one two three")), tokenizer, template)
    assert tokenized.turns == [-1, *[0] * (len(tokenized.turns) - 1)]


def test_tool_calls_are_scored_as_the_template_renders_them(tokenizer):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    messages = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    template = without_markers(CHATML).replace(
        "{{ message.content + '<|im_end|>' }}",
        "{{ (message.content or (message.tool_calls | tojson)) + '<|im_end|>' }}",
    )
    turns = said(tokenize_chat(Chat("chats.jsonl", 1, messages, None), tokenizer, template))
    assert turns[1].startswith("[{") and '"add"' in turns[1] and turns[1].endswith("<|im_end|>")
    assert turns[3] == "It is 3.<|im_end|>"
