"""The input of a scoring job: a bad row is named and left out, a bad file is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow
from pyarrow import parquet

from fusedrl.demo import CHATS
from fusedrl.scoring import ScoreError, job, score_chats
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.records import read_records

from .conftest import chat, rows

pytestmark = pytest.mark.heavy

GOOD = chat("Hi", "Hello!")
USER, SAID = GOOD["messages"]
SURROGATE = "\ud800"


def messages(*turns, **more):
    return {"messages": list(turns), **more}


def nested(depth, row):
    """A row with a list of that depth in the place of ``"DEEP"``."""
    return json.dumps(row).replace('"DEEP"', "[" * depth + "]" * depth)


# What a line holds, and what is said of it.
BAD = {
    "not json": ('{"messages": [', "unreadable line"),
    "not utf-8": (b'{"messages": "\xff"}', "unreadable line"),
    "nul characters": (b"\0\0\0", "unreadable line"),
    "nested": (nested(200_000, {"messages": "DEEP"}), "unreadable line: RecursionError"),
    "nested in what the template reads": (
        nested(
            940,
            messages(
                USER,
                {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": "DEEP"}}]},
            ),
        ),
        "RecursionError",
    ),
    "an enormous number": ('{"messages": ' + "9" * 10_000 + "}", "unreadable line"),
    "key twice": (
        json.dumps(GOOD).replace('"messages"', '"messages": [], "messages"'),
        "duplicate key 'messages' in an object",
    ),
    "a number": ("5", "got 5"),
    "no messages": ({"text": "hi"}, "expected one of the key sets input and preferred_output"),
    "empty chat": ({"messages": []}, "expected an assistant message to score, got the roles []"),
    "a message is null": (messages(USER, None, SAID), "messages[1]: expected"),
    "no assistant": (
        messages(USER),
        "expected an assistant message to score, got the roles ['user']",
    ),
    "control characters in the role": (
        messages({"role": "\x1b[2J", "content": "x"}),
        r"got the roles ['\x1b[2J']",
    ),
    "no role": (messages({"content": "hi"}, SAID), "messages[0]"),
    "no content": (
        messages(USER, {"role": "assistant"}),
        "messages[1]: expected content or tool_calls",
    ),
    "content is a number": (
        messages(USER, {"role": "assistant", "content": 5}),
        "messages[1].content: expected a string, got 5",
    ),
    "image": (messages({"role": "user", "content": [{"type": "image_url"}]}), "text parts only"),
    "part is null": (messages({"role": "user", "content": [None]}, SAID), "text parts only"),
    "surrogate in the content": (
        messages({"role": "user", "content": SURROGATE}, SAID),
        "the rendered chat is not valid Unicode",
    ),
    "surrogate in the role": (
        messages({"role": SURROGATE, "content": "x"}, USER, SAID),
        "the rendered chat is not valid Unicode",
    ),
    "surrogate that the template renders": (
        messages(USER, {"role": "assistant", "tool_calls": [{"name": SURROGATE}]}),
        "the rendered chat is not valid Unicode",
    ),
    "tools are text": (
        messages(USER, SAID, tools="calculator"),
        "tools: expected a list of objects",
    ),
    "tool calls are a number": (
        messages(USER, {"role": "assistant", "tool_calls": 5}),
        "messages[1].tool_calls: expected a list of objects, got 5",
    ),
    "too long": (chat("Count.", "one two three " * 600), "at most 1024 tokens"),
    "assistant first": (messages({"role": "assistant", "content": "Hi"}), "messages[0]"),
}
# Rows that are odd and right.
ODD = {
    "tools are empty": messages(USER, SAID, tools={}),
    "nul in the content": chat("a\0b", "c\0"),
    "surrogate where nobody reads": messages({**USER, SURROGATE: SURROGATE}, SAID),
    "special tokens in the content": chat("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>"),
    "markup": chat("[bold]</script><b>", "[/]"),
    "nan in a tool call": messages(
        USER,
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"a": float("nan")}}]},
        USER,
        SAID,
    ),
    "two answers": messages(USER, SAID, SAID),
    "byte order mark": b"\xef\xbb\xbf" + json.dumps(GOOD).encode(),
    "carriage return": json.dumps(GOOD).encode() + b"\r",
}
TOOL_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.content is defined else m.tool_calls | tojson }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Mixed:
    """A job over every bad row and every odd one, good ones between them."""

    def __init__(self, folder: Path, models) -> None:
        self.path, self.out = folder / "chats.jsonl", folder / "out"
        self.lines = {}
        lines = []
        for name, row in [(n, row) for n, (row, _) in BAD.items()] + list(ODD.items()):
            lines += [line_of(GOOD), line_of(row)]
            self.lines[name] = len(lines)
        self.path.write_bytes(b"\n".join(lines))
        template = folder / "template.jinja"
        template.write_text(TOOL_TEMPLATE)
        self.skipped = []
        self.summary = score_chats(
            self.path,
            models.policy,
            models.reference,
            self.out,
            job.Settings(chat_template=template, report_chats=200),
            on_skip=self.skipped.append,
        )


def line_of(row):
    text = row if isinstance(row, str | bytes) else json.dumps(row)
    return text.encode() if isinstance(text, str) else text


@pytest.fixture(scope="module")
def mixed(models, tmp_path_factory):
    return Mixed(tmp_path_factory.mktemp("mixed"), models)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_named_with_its_line_and_the_reason(mixed, name):
    start = f"{mixed.path}:{mixed.lines[name]}: "
    (said,) = [str(error) for error in mixed.skipped if str(error).startswith(start)]
    assert BAD[name][1] in said
    assert len(said) < 1000


def test_all_other_rows_are_scored(mixed):
    bad = {mixed.lines[name] for name in BAD}
    expected = [line for line in range(1, 2 * len(mixed.lines) + 1) if line not in bad]
    assert [row["chat"] for row in rows(mixed.out / "chats.parquet")] == expected
    assert [row["chat"] for row in mixed.summary.rows] == expected
    assert len(mixed.skipped) == len(mixed.summary.skipped) == len(BAD)


def test_what_was_left_out_is_counted_and_ends_the_command_with_1(write_chats, score, capsys):
    path = write_chats(GOOD, "{", GOOD)
    code, out = score(path)
    printed = capsys.readouterr()
    assert code == 1
    assert f"{path}:2: unreadable line" in printed.err
    assert "2 chats scored, 1 skipped (reasons in report.html)" in printed.out
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1, 3]


def test_of_many_bad_rows_the_first_are_printed_and_all_are_counted(write_chats, score, capsys):
    code, out = score(write_chats(GOOD, *["{"] * 150))
    printed = capsys.readouterr()
    assert code == 1
    assert printed.err.count("unreadable line") == 20
    assert printed.err.count("further skipped chats are not listed") == 1
    assert "1 chat scored, 150 skipped" in printed.out
    assert (out / "report.html").read_text().count("unreadable line") == 150


def test_strict_stops_at_a_bad_row_and_leaves_nothing(write_chats, score, capsys):
    path = write_chats(GOOD, BAD["surrogate in the role"][0], GOOD)
    code, out = score(path, "--strict")
    assert code == 2
    assert f"{path}:2: the rendered chat" in capsys.readouterr().err
    assert not out.exists()


FOREIGN = {
    "utf-16": "\n".join([json.dumps(GOOD)] * 3).encode("utf-16"),
    "gzip of something else": gzip.compress(b"a\nb"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_of_another_kind_is_refused_before_anything_is_loaded(tmp_path, name):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(FOREIGN[name])
    with pytest.raises(ScoreError, match="no chat to score"):
        score_chats(path, "no model", "no model", tmp_path / "out")


@pytest.mark.parametrize("path", ["none.jsonl", ".", "x" * 5000, "nul\0"])
def test_a_chats_file_that_is_no_file_is_named(tmp_path, path):
    with pytest.raises(ScoreError, match="chats: cannot read"):
        score_chats(tmp_path / path, "no model", "no model", tmp_path / "out")


def test_parquet_input_gives_the_same_tables(score, tmp_path):
    found = [parse_chats(record)[0].messages for record in read_records(CHATS).rows]
    path = tmp_path / "chats.PARQUET"
    parquet.write_table(pyarrow.table({"messages": found}), path, row_group_size=16)
    _, out = score(CHATS)
    from_jsonl = rows(out / "chats.parquet")
    code, out = score(path)
    assert code == 0
    expected = [{**row, "file": str(path)} for row in from_jsonl]
    assert rows(out / "chats.parquet") == expected


def table_of(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_parquet_row_that_is_not_utf8_costs_that_row(score, tmp_path, capsys):
    path = table_of(tmp_path / "in.parquet", messages=[[USER, {**SAID, "content": "marker"}]] * 2)
    whole = path.read_bytes()
    values = pyarrow.array(["Hi", "Hello!", "Hi", "marker"])
    broken = pyarrow.StringArray.from_buffers(
        4, values.buffers()[1], pyarrow.py_buffer(b"HiHello!Himar\xffer")
    )
    turns = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["user", "assistant"] * 2), broken], ["role", "content"]
    )
    table_of(path, messages=pyarrow.ListArray.from_arrays([0, 2, 4], turns))
    assert path.read_bytes() != whole
    code, out = score(path)
    assert code == 1
    assert f"{path}:2: unreadable line" in capsys.readouterr().err
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1]


def test_a_broken_parquet_file_is_named(score, tmp_path, capsys):
    path = tmp_path / "chats.parquet"
    path.write_bytes(b"PAR1 but not really")
    code, _ = score(path)
    assert code == 2
    assert f"chats: cannot read {path}: Parquet magic bytes not found" in capsys.readouterr().err
