"""The scoring job end to end: right numbers, every bad input, and nothing half-written."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.demo import CHATS
from fusedrl.demo.models import make_model, make_tokenizer
from fusedrl.scoring import ScoreError, Settings, batches, job, score_chats
from fusedrl.scoring.chats import parse_chat, read_records

from .conftest import chat

OUTPUTS = {"tokens.parquet", "chats.parquet", "report.html"}


def rows(path):
    return parquet.read_table(path).to_pylist()


def plain_scores(name, messages, temperature):
    """Log-prob and entropy of every token after the first: one unpadded chat, log_softmax."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
    return ids, log_p.gather(-1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tables_hold_what_plain_torch_computes_chat_by_chat(models, score, tmp_path, temperature):
    code, out = score(
        CHATS, "--temperature", temperature, "--estimator", "k1", "--max-tokens-per-batch", 700
    )
    assert code == 0
    tokens, chats = rows(out / "tokens.parquet"), rows(out / "chats.parquet")
    assert [row["chat"] for row in chats] == list(range(1, len(chats) + 1))
    assert len(chats) >= 40
    by_chat = {row["chat"]: [t for t in tokens if t["chat"] == row["chat"]] for row in chats}
    drift = 0.0
    for record in list(read_records(CHATS))[::5]:
        messages = parse_chat(record).messages
        own = by_chat[record.line]
        ids, policy, entropy = plain_scores(models.policy, messages, temperature)
        _, reference, _ = plain_scores(models.reference, messages, temperature)
        at = torch.tensor([t["position"] for t in own]) - 1
        expected = {
            "token": ids[at + 1],
            "policy_log_prob": policy[at],
            "reference_log_prob": reference[at],
            "entropy": entropy[at],
            "kl": (policy - reference)[at],
            "kl_k1": (policy - reference)[at],
            "kl_k3": ((reference - policy).exp() - 1 - (reference - policy))[at],
        }
        for name, values in expected.items():
            got = torch.tensor([t[name] for t in own], dtype=values.dtype)
            torch.testing.assert_close(got, values, atol=2e-5, rtol=2e-5, msg=name)
        row = chats[record.line - 1]
        assert row["length"] == len(ids)
        assert row["scored_tokens"] == len(own)
        assert row["kl_total"] == pytest.approx(expected["kl"].sum().item(), abs=1e-3)
        assert row["kl_mean"] == pytest.approx(expected["kl"].mean().item(), abs=1e-4)
        assert row["entropy_mean"] == pytest.approx(expected["entropy"].mean().item(), abs=1e-4)
        drift = max(drift, expected["kl"].abs().max().item())
    assert drift > 1e-3, "the two models must differ for the comparison to mean anything"


def test_texts_join_to_what_the_assistant_said(score):
    code, out = score(CHATS)
    assert code == 0
    said: dict = {}
    for token in rows(out / "tokens.parquet"):
        said.setdefault((token["chat"], token["turn"]), []).append(token["text"])
    spoken = {
        (record.line, turn): message["content"] + "<|im_end|>"
        for record in read_records(CHATS)
        for turn, message in enumerate(parse_chat(record).messages)
        if message["role"] == "assistant"
    }
    assert {key: "".join(texts) for key, texts in said.items()} == spoken


def test_batches_respect_the_limit_and_change_nothing(score):
    _, out = score(CHATS, "--max-tokens-per-batch", 1)
    alone = parquet.read_table(out / "tokens.parquet")
    _, out = score(CHATS, "--max-tokens-per-batch", 4096)
    together = parquet.read_table(out / "tokens.parquet")
    for name in ("chat", "turn", "position", "token", "text"):
        assert alone[name].equals(together[name])
    for name in ("policy_log_prob", "reference_log_prob", "entropy"):
        torch.testing.assert_close(
            torch.tensor(alone[name].to_numpy()),
            torch.tensor(together[name].to_numpy()),
            atol=1e-4,
            rtol=1e-4,
        )


def test_batches_keep_the_order_of_the_input(score, monkeypatch):
    _, out = score(CHATS)
    whole = rows(out / "tokens.parquet")
    monkeypatch.setattr(job, "BATCH", 7)
    _, out = score(CHATS)
    keys = [(t["chat"], t["position"]) for t in rows(out / "tokens.parquet")]
    assert keys == [(t["chat"], t["position"]) for t in whole]
    assert keys == sorted(keys)


def test_a_model_does_not_drift_from_itself(models, score):
    code, out = score(CHATS, reference=models.policy)
    assert code == 0
    assert all(row["kl_total"] == 0 for row in rows(out / "chats.parquet"))


def test_parquet_input_gives_the_same_tables(score, tmp_path):
    import pyarrow

    messages = [parse_chat(record).messages for record in read_records(CHATS)]
    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.table({"messages": messages}), path, row_group_size=16)
    _, out = score(CHATS)
    from_jsonl = rows(out / "chats.parquet")
    code, out = score(path)
    assert code == 0
    assert rows(out / "chats.parquet") == from_jsonl


GOOD = chat("Hi", "Hello!")
BAD = {
    "not json": ('{"messages": [', "unreadable line"),
    "not utf-8": (b'{"messages": "\xff"}', "unreadable line"),
    "no messages": ({"text": "hi"}, '{"messages": [...]}'),
    "empty chat": ({"messages": []}, "empty chat"),
    "no assistant": ({"messages": [{"role": "user", "content": "hi"}]}, "no assistant turn"),
    "no role": ({"messages": [{"content": "hi"}]}, "messages[0]"),
    "no content": ({"messages": [{"role": "assistant"}]}, "no content"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "text parts only",
    ),
    "surrogate": (r'{"messages": [{"role": "user", "content": "\ud800"}]}', "not valid Unicode"),
    "too long": (chat("Count.", "one two three " * 600), "at most 1024 tokens"),
    "assistant first": ({"messages": [{"role": "assistant", "content": "Hi"}]}, "messages[0]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_chat_is_named_skipped_and_counted(name, write_chats, score, capsys):
    row, problem = BAD[name]
    path = write_chats(GOOD, row, GOOD)
    code, out = score(path)
    printed = capsys.readouterr()
    assert code == 1
    assert f"{path}:2: " in printed.err
    assert problem in printed.err
    assert "2 chats scored, 1 skipped" in printed.out
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1, 3]
    assert f"{path.name}:2: " in (out / "report.html").read_text()


@pytest.mark.parametrize("name", BAD)
def test_strict_stops_at_a_bad_chat(name, write_chats, score, capsys):
    row, problem = BAD[name]
    path = write_chats(GOOD, row, GOOD)
    code, out = score(path, "--strict")
    printed = capsys.readouterr()
    assert code == 2
    assert f"{path}:2: " in printed.err
    assert problem in printed.err
    assert not out.exists()


def test_blank_lines_count_as_lines_but_not_as_chats(write_chats, score):
    code, out = score(write_chats(GOOD, "", GOOD), "--strict")
    assert code == 0
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1, 3]


def test_text_parts_read_as_their_text(write_chats, score):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo!"}]
    split = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    }
    _, out = score(write_chats(GOOD, split), "--strict")
    first, second = rows(out / "chats.parquet")
    assert first["kl_total"] == pytest.approx(second["kl_total"], abs=1e-6)


def test_nothing_left_to_score_is_refused(write_chats, score, capsys):
    code, out = score(write_chats({"messages": []}))
    assert code == 2
    assert "no chat to score, 1 skipped" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_job_leaves_the_earlier_files_alone(score, monkeypatch, failure, tmp_path):
    code, out = score(CHATS)
    assert code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert set(before) == OUTPUTS
    real, calls = batches.score_batch, []
    monkeypatch.setattr(job, "BATCH", 4)

    def failing(*args):
        calls.append(args)
        if len(calls) == 3:
            raise failure("in the middle")
        return real(*args)

    monkeypatch.setattr(job, "score_batch", failing)
    if failure is RuntimeError:
        with pytest.raises(RuntimeError, match="in the middle"):
            score(CHATS)
    else:
        assert score(CHATS)[0] == 130
    assert len(calls) == 3
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_different_vocabularies_are_refused(models, write_chats, score, tmp_path, capsys):
    other = make_tokenizer(["quite another text, from which other merges follow"] * 20, size=300)
    other.save_pretrained(tmp_path / "other")
    make_model(len(other)).save_pretrained(tmp_path / "other")
    code, out = score(write_chats(GOOD), reference=tmp_path / "other")
    assert code == 2
    assert "expected the policy's vocabulary" in capsys.readouterr().err
    assert not out.exists()


def test_embeddings_too_narrow_for_the_vocabulary_are_refused(
    models, tokenizer, write_chats, score, tmp_path, capsys
):
    make_model(len(tokenizer) - 8).save_pretrained(tmp_path / "narrow")
    tokenizer.save_pretrained(tmp_path / "narrow")
    code, _ = score(write_chats(GOOD), policy=tmp_path / "narrow")
    assert code == 2
    assert "resize its embeddings" in capsys.readouterr().err


def test_a_tokenizer_without_chat_template_needs_one(
    models, tokenizer, write_chats, score, tmp_path, capsys
):
    template = tmp_path / "template.jinja"
    template.write_text(tokenizer.chat_template)
    tokenizer.chat_template = None
    bare = tmp_path / "bare"
    AutoModelForCausalLM.from_pretrained(models.policy).save_pretrained(bare)
    tokenizer.save_pretrained(bare)
    path = write_chats(GOOD)
    code, out = score(path, policy=bare)
    assert code == 2
    assert "--chat-template FILE" in capsys.readouterr().err
    assert not out.exists()
    code, out = score(path, "--chat-template", template, policy=bare)
    assert code == 0
    assert rows(out / "chats.parquet")[0]["scored_tokens"] > 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "/no/such/model"}, "policy: cannot load a tokenizer from '/no/such/model'"),
        ({"reference": "/no/such/model"}, "reference: cannot load a tokenizer"),
    ],
)
def test_a_model_that_is_not_there_is_named(write_chats, score, capsys, options, message):
    code, _ = score(write_chats(GOOD), **options)
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_chats_file_that_is_not_there_is_named(models, tmp_path):
    with pytest.raises(ScoreError, match="chats: expected a file"):
        score_chats(tmp_path / "none.jsonl", models.policy, models.reference, tmp_path / "out")


def test_a_broken_parquet_file_is_named(score, tmp_path, capsys):
    path = tmp_path / "chats.parquet"
    path.write_bytes(b"PAR1 but not really")
    code, _ = score(path)
    assert code == 2
    assert f"{path}: not a readable Parquet file" in capsys.readouterr().err


def test_a_parquet_file_without_messages_is_named(score, tmp_path, capsys):
    import pyarrow

    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.table({"text": ["hi"]}), path)
    code, _ = score(path)
    assert code == 2
    assert "expected a column 'messages', got text" in capsys.readouterr().err


def test_summary_weighs_chats_by_their_tokens(models, tmp_path):
    summary = score_chats(
        CHATS, models.policy, models.reference, tmp_path, Settings(estimator="abs")
    )
    tokens = rows(tmp_path / "tokens.parquet")
    assert summary.mean("kl_mean") == pytest.approx(
        math.fsum(t["kl"] for t in tokens) / len(tokens), rel=1e-6
    )
    assert all(t["kl"] == pytest.approx(abs(t["kl_k1"]), abs=1e-7) for t in tokens)


def test_bundled_chats_are_varied():
    chats = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    assert len(chats) >= 40
    multi_turn = [c for c in chats if sum(m["role"] == "user" for m in c["messages"]) > 1]
    assert len(multi_turn) == len(chats)
    assert any(m["role"] == "system" for c in chats for m in c["messages"])


def test_a_device_that_is_not_there_is_named(write_chats, score, capsys):
    code, out = score(write_chats(GOOD), "--device", "cuda:99")
    assert code == 2
    assert "device: cannot compute on 'cuda:99'" in capsys.readouterr().err
    assert not out.exists()


def test_an_output_that_is_a_file_is_refused_and_kept(models, write_chats, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with pytest.raises(ScoreError, match="out: expected a directory"):
        score_chats(write_chats(GOOD), models.policy, models.reference, taken)
    assert taken.read_text() == "mine"
