"""Every format that data sets come in gives the scores of the same chats as plain messages."""

from __future__ import annotations

import gzip
import io
import json
import sys

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

import pyarrow
from pyarrow import parquet

from fusedrl.scoring import ScoreError, Settings, score_chats
from fusedrl.scoring.chats import parse_chats, survey
from fusedrl.scoring.records import Record, read_records

from .conftest import assistant, chat, lines, rows, sharegpt, sheet, user

pytestmark = pytest.mark.heavy

ASKED = ["What is 2 + 2?", "Name a colour.", "Say [no]."]
SAID = ["4", "Blue, or green.", "[no]"]
WORSE = ["5", "Bread.", "yes"]
PLAIN = [chat(*turns) for turns in zip(ASKED, SAID, strict=True)]
PAIRS = list(zip(ASKED, SAID, WORSE, strict=True))


def table(found):
    file = io.BytesIO()
    parquet.write_table(pyarrow.Table.from_pylist(found), file)
    return file.getvalue()


def openai(row):
    prompt = {"messages": user(row["prompt"]), "tools": [], "parallel_tool_calls": True}
    names = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
    return {"input": prompt, **{name: assistant(row[key]) for name, key in names.items()}}


ANSWERED = [{"prompt": a, "completion": b} for a, b, _ in PAIRS]
ALPACA = [{"instruction": a, "input": "", "output": b} for a, b, _ in PAIRS]
OF_STRINGS = [{"messages": json.dumps(row["messages"])} for row in PLAIN]
# A file -> its content, and how it is said.
SINGLE = {
    "messages.jsonl": (lines(PLAIN), "JSON lines with 'messages'"),
    "answers.jsonl": (lines(ANSWERED), "JSON lines with 'prompt' and 'completion'"),
    "answers-of-messages": (
        lines([{"prompt": user(a), "completion": assistant(b)} for a, b, _ in PAIRS]),
        "JSON lines with 'prompt' and 'completion'",
    ),
    "sharegpt.jsonl": (lines(map(sharegpt, PLAIN)), "JSON lines with 'conversations'"),
    "alpaca.json": (json.dumps(ALPACA).encode(), "a JSON array with 'instruction' and 'output'"),
    "array.json": (json.dumps(PLAIN, indent=2).encode(), "a JSON array with 'messages'"),
    "array-on-one-line.txt": (json.dumps(PLAIN).encode(), "a JSON array with 'messages'"),
    "structs.parquet": (table(PLAIN), "Parquet with 'messages'"),
    "sharegpt.parquet": (table(list(map(sharegpt, PLAIN))), "Parquet with 'conversations'"),
    "strings.parquet": (table(OF_STRINGS), "Parquet with 'messages'"),
    "answers.parquet": (table(ANSWERED), "Parquet with 'prompt' and 'completion'"),
    "alpaca.parquet": (table(ALPACA), "Parquet with 'instruction' and 'output'"),
    "answers.csv": (sheet(ANSWERED), "CSV with 'prompt' and 'completion'"),
    "alpaca.CSV": (sheet(ALPACA), "CSV with 'instruction' and 'output'"),
    "messages.csv": (sheet(OF_STRINGS), "CSV with 'messages'"),
    "semicolons.csv": (
        "\n".join([";".join(ANSWERED[0]), *(";".join(row.values()) for row in ANSWERED)]).encode(),
        "CSV with 'prompt' and 'completion'",
    ),
    "tabs.tsv": (
        "\n".join(
            ["\t".join(ANSWERED[0]), *("\t".join(row.values()) for row in ANSWERED)]
        ).encode(),
        "CSV with 'prompt' and 'completion'",
    ),
    "empty-columns.csv": (
        b"prompt,completion,,\r\n" + "".join(f'"{a}","{b}",,\r\n' for a, b, _ in PAIRS).encode(),
        "CSV with 'prompt' and 'completion'",
    ),
    "json.csv": (lines(PLAIN), "JSON lines with 'messages'"),
    "messages.jsonl.gz": (gzip.compress(lines(PLAIN)), "JSON lines with 'messages'"),
    "answers.csv.gz": (
        gzip.compress(sheet(ANSWERED)),
        "CSV with 'prompt' and 'completion'",
    ),
    "structs.gz": (gzip.compress(table(PLAIN)), "Parquet with 'messages'"),
}
CHOSEN = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in PAIRS]
WHOLE = [
    {"chosen": chat(a, b)["messages"], "rejected": chat(a, c)["messages"]} for a, b, c in PAIRS
]
PREFERENCES = {
    "strings.jsonl": lines(CHOSEN),
    "strings.csv": sheet(CHOSEN),
    "whole-conversations.jsonl": lines(WHOLE),
    "messages-behind-a-prompt.jsonl": lines(
        [{"prompt": user(a), "chosen": assistant(b), "rejected": assistant(c)} for a, b, c in PAIRS]
    ),
    "whole-conversations-beside-a-prompt.jsonl": lines(
        [{"prompt": a, **row} for (a, *_), row in zip(PAIRS, WHOLE, strict=True)]
    ),
    "strings.parquet": table([{k: json.dumps(v) for k, v in row.items()} for row in WHOLE]),
    "openai.jsonl": lines(map(openai, CHOSEN)),
    "openai.parquet": table(list(map(openai, CHOSEN))),
    "llama-factory.jsonl": lines(
        [
            {
                "conversations": sharegpt(chat(a, b))["conversations"][:1],
                "chosen": {"from": "gpt", "value": b},
                "rejected": {"from": "gpt", "value": c},
            }
            for a, b, c in PAIRS
        ]
    ),
    "alpaca.jsonl": lines(
        [{"instruction": a, "input": "", "chosen": b, "rejected": c} for a, b, c in PAIRS]
    ),
}


@pytest.fixture(scope="module")
def scored(models, tmp_path_factory):
    """Scores the content of a file: the rows of tokens.parquet and of chats.parquet."""

    def run(content, name="chats"):
        folder = tmp_path_factory.mktemp("scored")
        (folder / name).write_bytes(content)
        score_chats(folder / name, models.policy, models.reference, folder / "out")
        found = [rows(folder / "out" / name) for name in ("tokens.parquet", "chats.parquet")]
        assert {row.pop("file") for table in found for row in table} == {str(folder / name)}
        return found

    return run


@pytest.fixture(scope="module")
def plain(scored):
    return scored(lines(PLAIN))


@pytest.mark.parametrize("name", SINGLE)
def test_a_format_scores_as_plain_messages(scored, plain, tmp_path, name):
    content, said = SINGLE[name]
    assert scored(content, name) == plain
    path = tmp_path / name
    path.write_bytes(content)
    assert survey(read_records(path)) == (3, said)


@pytest.mark.parametrize("name", PREFERENCES)
def test_both_answers_of_a_preference_score_as_plain_messages(scored, plain, name):
    tokens, _ = scored(PREFERENCES[name], name)
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
    same = [{**row, "system": "Be brief."} for row in (sharegpt(PLAIN[0]), PLAIN[0], ALPACA[0])]
    same.append({**PLAIN[0], "system": [{"type": "text", "text": "Be brief."}]})
    expected = chat(ASKED[0], SAID[0], system="Be brief.")
    assert scored(lines(same)) == scored(lines([expected] * 4))


def test_alpacas_input_and_history_are_read_and_not_scored(scored):
    row = {
        **{"instruction": "Add.", "input": "2 and 2", "output": "4", "system": "Be brief."},
        "history": [["Hi", "Hello!"], ["Add 1 and 1", "2"]],
    }
    turns = ("Hi", "Hello!", "Add 1 and 1", "2", "Add.\n2 and 2")
    whole = chat(*turns, "4", system="Be brief.")["messages"]
    assert scored(lines([row])) == scored(lines([{"prompt": whole[:-1], "completion": "4"}]))
    assert scored(table([row])) == scored(lines([row]))


@pytest.mark.parametrize("answer", ['{"role": "Manager"}', '{"role": "assistant", "content": "x"}'])
def test_an_answer_that_is_json_stays_a_text(scored, answer):
    expected = scored(lines([chat("Who?", answer)]))
    assert scored(lines([{"prompt": "Who?", "completion": answer}])) == expected
    assert scored(lines([{"instruction": "Who?", "output": answer}])) == expected


@pytest.mark.parametrize("key", ["weight", "train", "loss_mask"])
@pytest.mark.parametrize("off", [0, 0.0, False])
def test_a_message_of_no_weight_is_read_and_not_scored(scored, key, off):
    whole = chat("Hi", "Hello!", "2 + 2?", "4")["messages"]
    later = scored(lines([{"prompt": whole[:3], "completion": whole[3:]}]))
    weighed = [{**m, key: weight} for m, weight in zip(whole, (1, off, 0, 1), strict=True)]
    assert scored(lines([{"messages": weighed}])) == later
    words = {"user": "human", "assistant": "gpt"}
    turns = [{"from": words[m["role"]], "value": m["content"], key: m[key]} for m in weighed]
    assert scored(lines([{"conversations": turns}])) == later
    log_probs = [-1.0] * len(later[0])
    tokens, _ = scored(lines([{"messages": weighed, "rollout_log_probs": log_probs}]))
    assert [row["rollout_log_prob"] for row in tokens] == log_probs


@pytest.mark.parametrize(
    "name", ["messages.jsonl", "array.json", "structs.parquet", "messages.jsonl.gz"]
)
def test_standard_input_is_read(scored, plain, models, tmp_path, monkeypatch, capsys, name):
    from fusedrl.cli import main

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(SINGLE[name][0])))
    pair = ["--policy", models.policy, "--reference", models.reference]
    assert main(["score", "-", *pair, "--out", str(tmp_path / "out")]) == 0
    tokens = rows(tmp_path / "out" / "tokens.parquet")
    assert {row.pop("file") for row in tokens} == {"<stdin>"}
    assert tokens == plain[0]
    assert f"<stdin>: {SINGLE[name][1]}" in capsys.readouterr().err


BYE = chat("Bye", "Bye.")["messages"]
CALL = {"name": "weather", "arguments": '{"city": "Oslo"}'}
# Rows that are refused: what is said of them, and what becomes of them by the advice.
REFUSED = {
    "from nobody": (
        {"conversations": [{"from": "bot", "value": "x"}]},
        r"conversations\[0\].from: expected one of human, user, gpt.*; rename it",
        [{"conversations": [{"from": "human", "value": "y"}, {"from": "gpt", "value": "x"}]}],
    ),
    "other keys": (
        {"question": "Hi", "answer": "Hello!"},
        "expected one of the key sets .*; prompt and completion; .* got {.*question.*; rename the",
        [{"prompt": "Hi", "completion": "Hello!"}],
    ),
    "an answer without its prompt": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello!", "rejected": "no"},
        r'chosen: expected a list of messages, as in {"chosen": \[...\]}',
        [{"chosen": chat("Hi", "Hello!")["messages"], "rejected": chat("Hi", "no")["messages"]}],
    ),
    "a conversation behind another prompt": (
        {"prompt": "Hi", "completion": BYE},
        'completion: expected the messages after .*; write whole conversations as "messages"',
        [{"prompt": "Hi", "messages": BYE}],
    ),
    "two conversations behind another prompt": (
        {"prompt": "Hi", "chosen": BYE, "rejected": BYE},
        'write whole conversations as "chosen" and "rejected" without a prompt',
        [{"chosen": BYE, "rejected": BYE}],
    ),
    "OpenAI's of whole conversations": (
        {
            "input": {"messages": user("Hi")},
            **{"preferred_output": BYE, "non_preferred_output": BYE},
        },
        'write whole conversations as "chosen" and "rejected" without a prompt',
        [{"chosen": BYE, "rejected": BYE}],
    ),
    "OpenAI's without its messages": (
        {
            **{"input": "Hi", "preferred_output": assistant("a")},
            "non_preferred_output": assistant("b"),
        },
        r'input: expected {"messages": \[...\]}, got .Hi.',
        [
            {
                **{"input": {"messages": user("Hi")}, "preferred_output": assistant("a")},
                "non_preferred_output": assistant("b"),
            }
        ],
    ),
    "log-probs beside two answers": (
        {"prompt": "a", "chosen": "b", "rejected": "c", "rollout_log_probs": [-1.0]},
        "rollout_log_probs: expected none for a pair of answers.*; write each answer as a separate",
        [{"prompt": "a", "completion": "b", "rollout_log_probs": [-1.0, -1.0]}],
    ),
    "answers to nothing": (
        {"question": "Hi", "chosen": assistant("a"), "rejected": assistant("b")},
        'chosen: expected a whole conversation, got only an answer; add .* "prompt"',
        [{"prompt": "Hi", "chosen": assistant("a"), "rejected": assistant("b")}],
    ),
    "a list as Python writes it": (
        {"prompt": "Hi", "completion": str(assistant("a"))},
        "completion: expected a list of messages, got text that is not JSON: .*; write the list",
        [{"prompt": "Hi", "completion": json.dumps(assistant("a"))}],
    ),
    "a list that is cut off": (
        {"messages": json.dumps(BYE)[:-20]},
        "messages: expected a list of messages, got text that is not JSON: .*; write the list",
        [{"messages": json.dumps(BYE)}],
    ),
    "history that is no list": (
        {"instruction": "a", "output": "b", "history": 5},
        "history: expected pairs of question and answer, got 5",
        [],
    ),
    "history that is no list of pairs": (
        {"instruction": "a", "output": "b", "history": ["Hi", "Hello!"]},
        "history: expected pairs of question and answer, got 'Hi'",
        [{"instruction": "a", "output": "b", "history": [["Hi", "Hello!"]]}],
    ),
    "an instruction that is no text": (
        {"instruction": user("a"), "output": "b"},
        "instruction, input: expected strings, got",
        [{"instruction": "a", "output": "b"}],
    ),
    "a weight that is text": (
        {"messages": [*user("a"), {**assistant("b")[0], "weight": "none"}]},
        r"messages\[1\]: weight, train, loss_mask: expected 0 or 1, got \['none'\]",
        [{"messages": [*user("a"), {**assistant("b")[0], "weight": 1}]}],
    ),
    "half a weight": (
        {"messages": [*user("a"), {**assistant("b")[0], "weight": 0.5}]},
        r"messages\[1\]: weight, train, loss_mask: expected 0 or 1, got \[0.5\]",
        [],
    ),
    "nothing that weighs": (
        {"messages": [*user("a"), {**assistant("b")[0], "weight": 0}]},
        r"messages: expected an assistant message .* roles \['user', 'assistant \(not scored\)'\]",
        [],
    ),
}


def test_a_row_that_no_shape_fits_is_refused_with_advice_that_works(models, tmp_path):
    advised = []
    for row, said, instead in REFUSED.values():
        with pytest.raises(ScoreError, match=said):
            parse_chats(Record("chats.jsonl", 1, "JSON lines", lambda row=row: row))
        advised += instead
    path = tmp_path / "chats.jsonl"
    path.write_bytes(lines(advised))
    pair = models.policy, models.reference
    summary = score_chats(path, *pair, tmp_path / "out", Settings(strict=True))
    assert {row["chat"] for row in summary.rows} == set(range(1, len(advised) + 1))
