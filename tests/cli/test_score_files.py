"""Which files `fusedrl score` reads, how much of them, and what it says for a script."""

from __future__ import annotations

import gzip
import json
import math
import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from fusedrl.scoring import ScoreError
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.records import read_records

from .conftest import chat, lines, rows, sharegpt, sheet, user

pytestmark = pytest.mark.heavy

PLAIN = [chat("What is 2 + 2?", "4"), chat("Name a colour.", "Blue, or green."), chat("Hi", "Ho")]


def test_several_files_and_patterns_are_read_in_order_and_once(score, tmp_path, capsys):
    (tmp_path / "folder.jsonl").mkdir()
    files = {"b.jsonl": PLAIN[:2], "a.jsonl": PLAIN[2:], "[c].jsonl": map(sharegpt, PLAIN[:1])}
    for name, found in files.items():
        (tmp_path / name).write_bytes(lines(found))
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "x").symlink_to(tmp_path)
    given = tmp_path / "[c].jsonl", tmp_path / "b.jsonl", tmp_path / "?*.jsonl", tmp_path / "x/b*"
    code, out = score(*given)
    assert code == 0
    said = [(row["file"], row["chat"]) for row in rows(out / "chats.parquet")]
    c, b, a = (str(tmp_path / name) for name in ("[c].jsonl", "b.jsonl", "a.jsonl"))
    assert said == [(c, 1), (b, 1), (b, 2), (a, 1)]
    printed = capsys.readouterr()
    assert "4 files: JSON lines with 'conversations'; JSON lines with 'messages'" in printed.err
    assert "b.jsonl:2" in printed.out
    assert "b.jsonl:2" in (out / "report.html").read_text()
    assert str(tmp_path) not in (out / "report.html").read_text()


def test_files_of_one_name_are_told_apart_by_their_folders(score, tmp_path, capsys):
    for folder in "pq":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chats.jsonl").write_bytes(lines(PLAIN[:1]) + b"\n{")
    _, out = score(tmp_path / "*" / "chats.jsonl", "--limit", 4)
    printed, page = capsys.readouterr().out, (out / "report.html").read_text()
    assert str(tmp_path) not in page
    for name in ("p/chats.jsonl:1", "q/chats.jsonl:1"):
        assert name in printed
        assert name in page
    assert "p/chats.jsonl:2: unreadable line" in page
    assert re.search(r"limit\W+(<[^>]*>\W*)*4", page)


def test_an_empty_cell_is_no_value(tmp_path):
    """As the tables of two data sets together have it, written with NaN or with nothing."""
    columns = ["prompt", "completion", "chosen", "rejected", "system", "instruction", "output"]
    found = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"instruction": "a", "output": "b"},
        {"prompt": "a"},
    ]
    whole = [{column: row.get(column) for column in columns} for row in found]
    (tmp_path / "a.csv").write_bytes(sheet(whole))
    nan = [{key: math.nan if x is None else x for key, x in row.items()} for row in whole]
    (tmp_path / "b.jsonl").write_bytes(lines({**row, "history": math.nan} for row in nan))
    for name in ("a.csv", "b.jsonl"):
        *records, last = read_records(tmp_path / name).rows
        read = [parse_chats(record) for record in records]
        assert [len(chats) for chats in read] == [1, 2, 1]
        assert all(chat.messages[:1] == user("a") for chats in read for chat in chats)
        with pytest.raises(ScoreError, match="expected one of the key sets"):
            parse_chats(last)


def test_a_limit_is_of_rows_from_the_first(score, tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(lines(PLAIN[:2]) + b"\n{")
    code, out = score(path, "--limit", 2)
    assert code == 0
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1, 2]
    assert score(path, path.parent, "--limit", 2)[0] == 0  # the folder is never read
    assert score(path, tmp_path / "none.jsonl", "--limit", 2)[0] == 2
    assert score(path, "--limit", 0)[0] == 2
    assert "limit: expected at least 1, got 0" in capsys.readouterr().err


def test_variables_of_the_template_are_given_as_json(score, tmp_path, capsys):
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    path.write_bytes(lines(PLAIN[:1]))
    template.write_text(
        "{{ messages[0].content }}{%- generation -%}{{ messages[1].content + mark }}"
        "{%- endgeneration -%}"
    )
    options = "--chat-template", template, "--chat-template-kwargs"
    code, out = score(path, *options, '{"mark": "!"}')
    assert code == 0
    assert [row["text"] for row in rows(out / "tokens.parquet")][-1] == "!"
    assert re.search(r"mark\W+(<[^>]*>\W*)*!", (out / "report.html").read_text())
    for wrong in ("mark", "[1]"):
        with pytest.raises(SystemExit):
            score(path, *options, wrong)
        assert "expected a JSON object" in capsys.readouterr().err


def test_what_the_template_leaves_out_of_the_context_is_counted(score, tmp_path, capsys):
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.role == 'assistant' else m.content | tojson }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    asked, answer = {"role": "user", "content": 'A "quoted"\nquestion'}, PLAIN[0]["messages"][-1]
    # A text that stands in another message, too.
    system, tools = {"role": "system", "content": "quoted"}, [{"name": "clock"}]
    chats = [
        {"messages": [asked, answer]},
        {"messages": [system, asked, answer], "tools": tools},
        {"messages": [system, asked, answer]},
    ]
    path.write_bytes(lines(chats))
    options = path, "--chat-template", template
    assert score(*options)[0] == 0
    printed = capsys.readouterr().out
    assert "2 chats with system messages that the chat template does not render" in printed
    assert "1 chat with tools that the chat template does not render" in printed
    _, out = score(*options, "--json")
    figures = json.loads(capsys.readouterr().out)
    assert figures["not_rendered"] == {"system messages": 2, "tools": 1}
    assert "2 chats with system messages that" in (out / "report.html").read_text()


def test_a_context_that_a_template_rewrites_is_not_left_out(score, tmp_path, capsys):
    path, template = tmp_path / "chats.jsonl", tmp_path / "template.jinja"
    template.write_text(
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if m.role == 'assistant' else m.content | e | lower }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": 'A "Quoted"\n<question>'}, PLAIN[0]["messages"][-1]]
    path.write_bytes(lines([{"messages": messages, "tools": [{"name": "clock"}]}]))
    assert score(path, "--chat-template", template, "--json")[0] == 0
    assert "not_rendered" not in json.loads(capsys.readouterr().out)
    variables = '{"tools": [{"name": "clock"}]}'  # of all chats, for a template without tools
    path.write_bytes(lines([{"messages": messages}]))
    assert score(path, "--chat-template-kwargs", variables, "--json")[0] == 0
    assert json.loads(capsys.readouterr().out)["not_rendered"] == {"tools": 1}


def test_one_object_may_have_several_lines(score, tmp_path):
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(PLAIN[0], indent=2))
    code, out = score(path)
    assert code == 0 and len(rows(out / "chats.parquet")) == 1


def test_names_of_files_are_printed_as_they_are(score, tmp_path, capsys):
    folder = tmp_path / "q["
    folder.mkdir()
    for name in ("x].jsonl", "b[red].jsonl", ":smile:.jsonl"):
        (folder / name).write_bytes(lines(PLAIN[:1]))
    assert score(tmp_path / "q[[]/*.jsonl")[0] == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("x].jsonl:1", "b[red].jsonl:1", ":smile:.jsonl:1"))


def test_a_script_gets_the_summary_as_one_line_of_json(score, tmp_path, capsys):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(lines([{"prompt": "a", "chosen": "b", "rejected": "c"}] * 3) + b"\n{")
    code, out = score(path, "--json", "--forward-kl")
    assert code == 1
    (line,) = capsys.readouterr().out.splitlines()
    figures, tokens = json.loads(line), rows(out / "tokens.parquet")
    assert (figures["chats"], figures["skipped"], figures["tokens"]) == (6, 1, len(tokens))
    columns = {"kl_mean": "kl", "kl_forward_mean": "kl_forward", "entropy_mean": "entropy"}
    for name, column in columns.items():
        mean = sum(row[column] for row in tokens) / len(tokens)
        assert figures[name] == pytest.approx(mean, rel=1e-6)
    worse = [row["kl"] for row in tokens if row["answer"] == "rejected"]
    assert figures["rejected"]["chats"] == 3
    assert "of rejected answers" in (out / "report.html").read_text()
    assert figures["rejected"]["kl_mean"] == pytest.approx(sum(worse) / len(worse), rel=1e-6)


EMPTY = {"chats.jsonl": b"\n \n", "chats.csv": b"", "chats.json": b"[]"}


@pytest.mark.parametrize("name", EMPTY)
@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_an_empty_file_is_said_to_be_empty(tmp_path, name, packed):
    path = tmp_path / name
    path.write_bytes(packed(EMPTY[name]))
    with pytest.raises(ScoreError, match=f"{name}: the file is empty"):
        read_records(path)
    with pytest.raises(ScoreError, match="2 files: all of them are empty"):
        read_records([path, tmp_path / "chats*", "/dev/null"])


BROKEN = {
    "cut.jsonl.gz": gzip.compress(lines(PLAIN))[:-9],
    "other.gz": b"\x1f\x8b but not really",
    "cells.csv": b"prompt,completion\na,b,c\n",
    "twice.csv": b"prompt,prompt,completion\na,b,c\n",
    "open.csv": b'prompt,completion\na,"b\nc,d\n',
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(BROKEN[name])
    with pytest.raises(ScoreError, match=rf"chats: cannot read .*{name}: .*; check the path"):
        read_records(path)


@pytest.mark.parametrize("end", [b"", b"{", b" x]", b'{"messages": 5} 7]', b"5] x"])
def test_an_array_that_breaks_off_is_refused(tmp_path, end):
    path = tmp_path / "chats.json"
    path.write_bytes(b"[\n" + json.dumps(PLAIN[0]).encode() + b",\n" + end)
    with pytest.raises(ScoreError, match=r"chats: cannot read .*chats.json: .* line "):
        read_records(path)
