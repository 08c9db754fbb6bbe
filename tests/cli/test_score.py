"""The scoring job end to end: its tables hold the right numbers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.cli import main
from fusedrl.cli.score import EXAMPLES
from fusedrl.demo import CHATS
from fusedrl.scoring import Settings, score_chats
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.records import read_records

from .conftest import pasted, rows

pytestmark = pytest.mark.heavy


def plain_scores(name, messages, temperature):
    """Log-prob and entropy of every token after the first: one unpadded chat, log_softmax."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)
    return ids, log_p.gather(-1, ids[1:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [0.6, pytest.param(1.0, marks=pytest.mark.slow)])
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
    for record in read_records(CHATS).rows[::5]:
        messages = parse_chats(record)[0].messages
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
        for record in read_records(CHATS).rows
        for turn, message in enumerate(parse_chats(record)[0].messages)
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


def test_summary_weighs_chats_by_their_tokens(models, tmp_path):
    summary = score_chats(
        CHATS, models.policy, models.reference, tmp_path, Settings(estimator="abs")
    )
    tokens = rows(tmp_path / "tokens.parquet")
    assert summary.mean("kl_mean") == pytest.approx(
        math.fsum(t["kl"] for t in tokens) / len(tokens), rel=1e-6
    )
    assert all(t["kl"] == pytest.approx(abs(t["kl_k1"]), abs=1e-7) for t in tokens)


def test_the_examples_of_the_help_run_as_they_stand(models, tmp_path, monkeypatch, capsys):
    """Pasted into a shell, where models are that are made as ``fusedrl demo`` makes its own."""
    made, *commands = pasted(EXAMPLES.partition("\n\n")[0] + "\n", tmp_path)
    assert made == ["demo"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-out").mkdir()
    (tmp_path / "demo-out" / "models").symlink_to(Path(models.policy).parent)
    for command in commands:
        assert main(command) == 0
        assert "1 chat scored, 0 skipped" in capsys.readouterr().out
        assert len(rows(tmp_path / "drift" / "chats.parquet")) == 1
