"""Every format that data sets come in gives the scores of the same chats as plain messages."""

from __future__ import annotations

import io
import json
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow
from pyarrow import parquet

from fusedrl.scoring import ScoreError
from fusedrl.scoring.chats import parse_chats, survey
from fusedrl.scoring.records import Record, read_records

from .conftest import chat, rows

pytestmark = pytest.mark.heavy

ASKED = ["What is 2 + 2?", "Name a colour.", "Say [no]."]
SAID = ["4", "Blue, or green.", "[no]"]
WORSE = ["5", "Bread.", "yes"]
PLAIN = [chat(*turns) for turns in zip(ASKED, SAID, strict=True)]
PAIRS = list(zip(ASKED, SAID, WORSE, strict=True))


def user(text):
    return [{"role": "user", "content": text}]


def assistant(text):
    return [{"role": "assistant", "content": text}]


def sharegpt(row):
    words = {"user": "human", "assistant": "gpt"}
    turns = [{"from": words[m["role"]], "value": m["content"]} for m in row["messages"]]
    return {"conversations": turns}


def lines(found):
    return "\n".join(map(json.dumps, found)).encode()


def table(found):
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(found), file)
    return file.getvalue()


# A format -> the content of its file, and how it is said.
SINGLE = {
    "messages": (lines(PLAIN), "JSON lines with 'messages'"),
    "prompt and completion": (
        lines([{"prompt": a, "completion": b} for a, b, _ in PAIRS]),
        "JSON lines with 'prompt' and 'completion'",
    ),
    "prompt and completion of messages": (
        lines([{"prompt": user(a), "completion": assistant(b)} for a, b, _ in PAIRS]),
        "JSON lines with 'prompt' and 'completion'",
    ),
    "sharegpt": (lines(map(sharegpt, PLAIN)), "JSON lines with 'conversations'"),
    "array": (json.dumps(PLAIN, indent=2).encode(), "a JSON array with 'messages'"),
    "array on one line": (json.dumps(PLAIN).encode(), "a JSON array with 'messages'"),
    "parquet of structs": (table(PLAIN), "Parquet with 'messages'"),
    "parquet of sharegpt": (table(list(map(sharegpt, PLAIN))), "Parquet with 'conversations'"),
    "parquet of JSON strings": (
        table([{"messages": json.dumps(row["messages"])} for row in PLAIN]),
        "Parquet with 'messages'",
    ),
    "parquet of strings": (
        table([{"prompt": a, "completion": b} for a, b, _ in PAIRS]),
        "Parquet with 'prompt' and 'completion'",
    ),
}
PREFERENCES = {
    "strings": lines([{"prompt": a, "chosen": b, "rejected": c} for a, b, c in PAIRS]),
    "whole conversations": lines(
        [
            {"chosen": chat(a, b)["messages"], "rejected": chat(a, c)["messages"]}
            for a, b, c in PAIRS
        ]
    ),
    "messages behind a prompt": lines(
        [{"prompt": user(a), "chosen": assistant(b), "rejected": assistant(c)} for a, b, c in PAIRS]
    ),
    "whole conversations beside a prompt": lines(
        [
            {"prompt": a, "chosen": chat(a, b)["messages"], "rejected": chat(a, c)["messages"]}
            for a, b, c in PAIRS
        ]
    ),
    "parquet of JSON strings": table(
        [
            {
                "chosen": json.dumps(chat(a, b)["messages"]),
                "rejected": json.dumps(chat(a, c)["messages"]),
            }
            for a, b, c in PAIRS
        ]
    ),
}


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory):
    """Scores the content of a file: the rows of tokens.parquet and of chats.parquet."""
    from fusedrl.scoring import score_chats

    def run(content):
        folder = tmp_path_factory.mktemp("scored")
        (folder / "chats").write_bytes(content)
        score_chats(folder / "chats", models.policy, models.reference, folder / "out")
        return [rows(folder / "out" / name) for name in ("tokens.parquet", "chats.parquet")]

    return run


@pytest.fixture(scope="module")
def plain(scored):
    return scored(lines(PLAIN))


@pytest.mark.parametrize("name", SINGLE)
def test_a_format_scores_as_plain_messages(scored, plain, tmp_path, name):
    content, said = SINGLE[name]
    assert scored(content) == plain
    path = tmp_path / "chats"
    path.write_bytes(content)
    assert survey(read_records(path)) == (3, said)


@pytest.mark.parametrize("name", PREFERENCES)
def test_both_answers_of_a_preference_score_as_plain_messages(scored, plain, name):
    tokens, _ = scored(PREFERENCES[name])
    worse, _ = scored(lines([chat(a, c) for a, _, c in PAIRS]))
    for answer, expected in (("chosen", plain[0]), ("rejected", worse)):
        own = [row for row in tokens if row["answer"] == answer]
        assert [row["policy_log_prob"] for row in own] == pytest.approx(
            [row["policy_log_prob"] for row in expected], abs=1e-5
        )
        assert [row["token"] for row in own] == [row["token"] for row in expected]
    assert {row["answer"] for row in tokens} == {"chosen", "rejected"}


def test_a_prompt_is_read_and_not_scored(scored):
    whole = chat("Hi", "Hello!", "2 + 2?", "4")["messages"]
    tokens, _ = scored(lines([{"messages": whole}]))
    later, _ = scored(lines([{"prompt": whole[:3], "completion": whole[3:]}]))
    assert {row["turn"] for row in tokens} == {1, 3}
    last = [row for row in tokens if row["turn"] == 3]
    assert [(row["turn"], row["position"], row["token"]) for row in later] == [
        (row["turn"], row["position"], row["token"]) for row in last
    ]
    assert [row["kl"] for row in later] == pytest.approx([row["kl"] for row in last], abs=1e-5)
    worse = [*whole[:3], *assistant("5")]
    pair, _ = scored(lines([{"chosen": whole, "rejected": worse}]))
    assert {row["turn"] for row in pair} == {3}


def test_a_system_prompt_of_its_own_is_read(scored):
    row = {**sharegpt(PLAIN[0]), "system": "Be brief."}
    assert scored(lines([row])) == scored(lines([chat(ASKED[0], SAID[0], system="Be brief.")]))


@pytest.mark.parametrize("name", ["messages", "array", "parquet of structs"])
def test_standard_input_is_read(scored, plain, models, tmp_path, monkeypatch, capsys, name):
    from fusedrl.cli import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SINGLE[name][0])))
    pair = ["--policy", models.policy, "--reference", models.reference]
    assert main(["score", "-", *pair, "--out", str(tmp_path / "out")]) == 0
    assert rows(tmp_path / "out" / "tokens.parquet") == plain[0]
    assert f"<stdin>: {SINGLE[name][1]}" in capsys.readouterr().err


BAD = {
    "from nobody": (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        r"conversations\[0\].from: expected one of human, user, gpt",
    ),
    "an answer without its prompt": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "no"},
        "chosen: expected a list of messages, ",
    ),
    "a conversation behind another prompt": (
        {"prompt": "Hi", "completion": chat("Bye", "Bye.")["messages"]},
        "completion: expected what follows the prompt",
    ),
    "log-probs beside two answers": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "rollout_log_probs": [-1.0]},
        "rollout_log_probs: expected none beside two answers",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_no_format_has_is_refused(name):
    row, said = BAD[name]
    with pytest.raises(ScoreError, match=said):
        parse_chats(Record("chats.jsonl:1", 1, lambda: row))


@pytest.mark.parametrize("end", [b"", b"{", b" x]", b'{"messages": 5} 7]', b"5] x"])
def test_an_array_that_breaks_off_is_refused(tmp_path, end):
    path = tmp_path / "chats.json"
    path.write_bytes(b"[\n" + json.dumps(PLAIN[0]).encode() + b",\n" + end)
    with pytest.raises(ScoreError, match=r"chats: cannot read .*chats.json: .* line "):
        read_records(path)
