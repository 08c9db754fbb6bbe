"""Tool calls are scored as the template renders them, however a file writes them."""

from __future__ import annotations

import io
import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow
from pyarrow import parquet

from fusedrl.demo.models import make_tokenizer
from fusedrl.scoring import ChatError
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.records import Record, read_records
from fusedrl.scoring.tokenization import tokenize_chat

TEMPLATE = """\
{%- if tools -%}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{%- endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls -%}
{%- set called = call.function if call.function is defined else call -%}
CALL
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
CALLS = {
    "objects": "{{ called.name + '|' + (called.arguments | tojson) }}",  # as Qwen's
    "items": (  # as GLM's
        "{{ called.name }}{%- for key, value in called.arguments.items() -%}"
        "{{ '|' + key + '=' + value }}{%- endfor -%}"
    ),
    "text": "{{ called.name + '|' + called.arguments }}",  # as DeepSeek's
    "python": "{{ called.name ~ '|' ~ called.arguments }}",
    "either": (
        "{{ called.name + '|' }}{{ called.arguments if called.arguments is string "
        "else called.arguments | tojson }}"
    ),
}
WRITTEN = {
    "objects": 'weather|{"city": "Oslo", "unit": "°C"}',
    "items": "weather|city=Oslo|unit=°C",
    "text": 'weather|{"city":"Oslo", "unit":"°C"}',
    "python": 'weather|{"city":"Oslo", "unit":"°C"}',
    "either": 'weather|{"city": "Oslo", "unit": "°C"}',
}
ARGUMENTS = {"city": "Oslo", "unit": "°C"}
TEXT = '{"city":"Oslo", "unit":"°C"}'
ASKED = {"role": "user", "content": "How warm?"}
ANSWER = {"role": "tool", "content": "4"}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer([""], size=0)


def calling(arguments, **more):
    function = {"name": "weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}], **more}


def chat_of(row):
    (chat,) = parse_chats(Record("chats.jsonl", 7, "JSON lines", lambda: row))
    return chat


def said(row, tokenizer, template):
    """What is scored of the first turn of the assistant."""
    made = tokenize_chat(chat_of(row), tokenizer, template)
    first = min(turn for turn in made.turns if turn >= 0)
    pairs = zip(made.turns, made.texts, strict=True)
    return "".join(text for turn, text in pairs if turn == first).removesuffix("<|im_end|>")


FORMS = {
    "openai": {"messages": [ASKED, calling(TEXT), ANSWER]},
    "openai with empty text": {"messages": [ASKED, calling(TEXT, content=""), ANSWER]},
    "openai before tools": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "weather", "arguments": TEXT},
            },
            {"role": "function", "name": "weather", "content": "4"},
        ]
    },
    "a function as JSON": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": "",
                "function_call": json.dumps({"name": "weather", "arguments": TEXT}),
            },
        ]
    },
    "calls as JSON": {
        "messages": [
            ASKED,
            {**calling(TEXT), "tool_calls": json.dumps(calling(TEXT)["tool_calls"])},
        ]
    },
    "without a type": {
        "messages": [
            ASKED,
            {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": TEXT}]},
        ]
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "How warm?"},
            {
                "from": "function_call",
                "value": json.dumps({"name": "weather", "arguments": TEXT}),
            },
            {"from": "observation", "value": "4"},
        ]
    },
    "sharegpt's list": {
        "conversations": [
            {"from": "human", "value": "How warm?"},
            {
                "from": "function_call",
                "value": json.dumps([{"name": "weather", "arguments": TEXT}]),
            },
        ]
    },
    "sharegpt's list of OpenAI's": {
        "conversations": [
            {"from": "human", "value": "How warm?"},
            {"from": "function_call", "value": json.dumps(calling(TEXT)["tool_calls"])},
        ]
    },
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_rendered_as_the_template_takes_it(tokenizer, form, kind):
    template = TEMPLATE.replace("CALL", CALLS[kind])
    assert said(FORMS[form], tokenizer, template) == WRITTEN[kind]


@pytest.mark.parametrize("kind", CALLS)
def test_arguments_may_be_objects(tokenizer, kind):
    template = TEMPLATE.replace("CALL", CALLS[kind])
    expected = WRITTEN["objects"] if kind in ("text", "python") else WRITTEN[kind]
    assert said({"messages": [ASKED, calling(ARGUMENTS)]}, tokenizer, template) == expected


def test_what_the_functions_answered_stays_theirs(tokenizer):
    roles = [message["role"] for message in chat_of(FORMS["openai before tools"]).messages]
    assert roles == ["user", "assistant", "tool"]
    assert [m["role"] for m in chat_of(FORMS["sharegpt"]).messages] == roles


@pytest.mark.parametrize("arguments", ["", "{}", {}, None])
def test_a_call_may_have_no_arguments(tokenizer, arguments):
    message = calling(arguments)
    message["tool_calls"] += calling(TEXT)["tool_calls"]  # as it is without the other
    template = TEMPLATE.replace("CALL", CALLS["objects"])
    row = {"messages": [ASKED, message]}
    assert said(row, tokenizer, template) == "weather|{}" + WRITTEN["objects"]


WRONG = [
    *[
        calling(given)["tool_calls"][0]
        for given in ("{", "Oslo", "[1]", '{"a": 1, "a": 2}', 5, [1])
    ],
    {"name": "weather", "parameters": {"city": "Oslo"}},
    {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
    {"function": {"arguments": {"city": "Oslo"}}},
    {"function": "weather"},
]


@pytest.mark.parametrize("call", WRONG, ids=str)
def test_a_call_without_name_or_arguments_is_refused(call):
    with pytest.raises(ChatError, match=r"chats.jsonl:7: messages\[1\].tool_calls\[0\]: expected"):
        chat_of({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]})


def test_a_template_that_needs_content_gets_it(tokenizer):
    needs = TEMPLATE.replace("(message.content or '')", "message['content'] + ''")
    row = {"messages": [ASKED, calling(TEXT, content=None)]}
    assert said(row, tokenizer, needs.replace("CALL", CALLS["text"])) == WRITTEN["text"]


DROPS = {
    "no calls at all": "",
    "the arguments alone": "{{ called.arguments | tojson }}",
    "calls beside a text": "{%- if not message.content -%}{{ called | tojson }}{%- endif -%}",
    "all but the first": "{%- if loop.first -%}{{ called | tojson }}{%- endif -%}",
}
TEXTS = {
    "the text beside calls": TEMPLATE.replace(  # as Llama 3.1's
        "(message.content or '')", "('' if message.tool_calls else message.content)"
    ).replace("CALL", CALLS["objects"]),
    "texts that are no parts": TEMPLATE.replace(  # as those of models that see
        "(message.content or '')", "(message.content | selectattr('text', 'defined') | join)"
    ).replace("CALL", CALLS["objects"]),
}


@pytest.mark.parametrize("name", DROPS)
def test_a_template_that_leaves_out_a_call_is_refused_with_advice_that_works(tokenizer, name):
    message = calling(TEXT, content="Let me see.")
    message["tool_calls"] *= 2
    row = {"messages": [ASKED, message], "tools": [{"name": "weather"}]}
    with pytest.raises(ChatError, match="does not render all of its tool_calls"):
        said(row, tokenizer, TEMPLATE.replace("CALL", DROPS[name]))
    copy = TEMPLATE.replace("CALL", CALLS["objects"])
    assert said(row, tokenizer, copy) == "Let me see." + 2 * WRITTEN["objects"]


@pytest.mark.parametrize("name", TEXTS)
def test_a_template_that_leaves_out_a_text_is_refused(tokenizer, name):
    row = {"messages": [ASKED, calling(TEXT, content="Let me see.")]}
    with pytest.raises(ChatError, match="does not render all of its content"):
        said(row, tokenizer, TEXTS[name])


def test_a_template_that_refuses_both_forms_says_why(tokenizer):
    template = TEMPLATE.replace("CALL", "{{ raise_exception('no calls here') }}")
    with pytest.raises(ChatError, match=r"refuses the first 2 of 2 messages: .*no calls here"):
        said({"messages": [ASKED, calling(TEXT)]}, tokenizer, template)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def test_a_file_as_parquet_is_scored_as_its_json_lines(tokenizer, tmp_path):
    """Arrow gives every key to every row: those that are null are left out at every depth."""
    city, zone = {"type": "string"}, {"type": "string", "enum": ["CET", None]}
    found = [
        {
            "messages": [ASKED, calling({"city": "Oslo", "at": {"hour": 9}}), ANSWER],
            "tools": [tool("weather", city=city), tool("clock", zone=zone)],
        },
        {
            "messages": [ASKED, calling({"at": {"day": [1, None]}, "zone": "CET"}, content="a")],
            "tools": [tool("clock", zone=zone)],
        },
        {"messages": [ASKED, {"role": "assistant", "content": "b"}], "tools": None},
    ]
    lines, table = tmp_path / "chats.jsonl", io.BytesIO()
    lines.write_text("\n".join(map(json.dumps, found)))
    parquet.write_table(pyarrow.Table.from_pylist(found), table)
    (tmp_path / "chats.parquet").write_bytes(table.getvalue())
    template = TEMPLATE.replace("CALL", CALLS["objects"])
    texts = [
        [
            "".join(tokenize_chat(chat, tokenizer, template).texts)
            for record in read_records(tmp_path / name).rows
            for chat in parse_chats(record)
        ]
        for name in ("chats.jsonl", "chats.parquet")
    ]
    assert texts[0] == texts[1]
    assert 'weather|{"city": "Oslo", "at": {"hour": 9}}' in texts[1][0]
    assert json.dumps(found[1]["tools"]) in texts[1][1]


def test_a_null_in_arguments_that_are_text_was_said_and_stays(tokenizer):
    row = {"messages": [ASKED, calling('{"city": null}')]}
    template = TEMPLATE.replace("CALL", CALLS["objects"])
    assert said(row, tokenizer, template) == 'weather|{"city": null}'


def test_calls_outside_the_markers_of_a_template_are_refused(tokenizer):
    marked = (
        "{%- for message in messages -%}{{ message.role }}{%- generation -%}"
        "{{ message.content }}{%- endgeneration -%}"
        "{{ message.tool_calls | default([]) | tojson }}{%- endfor -%}"
    )
    row = {"messages": [ASKED, calling(TEXT, content="Let me see.")]}
    with pytest.raises(ChatError, match="does not render all of its tool_calls"):
        said(row, tokenizer, marked)


def test_tools_of_all_chats_may_be_given_as_variables(tokenizer):
    tools, chat = [{"name": "clock"}], chat_of({"messages": [ASKED, calling(TEXT)]})
    template = TEMPLATE.replace("CALL", CALLS["objects"])
    made = tokenize_chat(chat, tokenizer, template, variables={"tools": tools})
    assert "".join(made.texts).startswith('<|im_start|>system\n[{"name": "clock"}]')


@pytest.mark.parametrize("where", ["tools", "bare tools", "functions", "input"])
def test_the_tools_of_a_row_are_rendered(tokenizer, where):
    function = {"name": "weather", "parameters": {}}
    tools = [{"type": "function", "function": function}]
    row: dict = {"messages": [ASKED, calling(TEXT)], "tools": tools}
    if where == "functions":
        row = {"messages": row["messages"], "functions": [function]}
    elif where == "bare tools":
        row["tools"] = json.dumps([function])
    elif where == "input":
        answers = [calling(TEXT)]
        row = {
            "input": {"messages": [ASKED], "tools": tools},
            "preferred_output": answers,
            "non_preferred_output": answers,
        }
    for chat in parse_chats(Record("chats.jsonl", 1, "JSON lines", lambda: row)):
        assert chat.tools == tools
