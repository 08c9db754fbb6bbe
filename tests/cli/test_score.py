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
from fusedrl.scoring import score_chats
from fusedrl.scoring.chats import parse_chats
from fusedrl.scoring.records import read_records

from .conftest import pasted, rows

pytestmark = pytest.mark.heavy


def log_softmax(name, messages, temperature):
    """The ids of a chat, and all log-probs of every token after the first in float64."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float64).eval()
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        return ids, torch.log_softmax(model(ids[None]).logits[0, :-1] / temperature, dim=-1)


@pytest.mark.parametrize(
    ("temperature", "kl"),
    [(0.6, "exact"), (1.0, "k1"), pytest.param(1, "k3", marks=pytest.mark.slow)],
)
def test_tables_hold_what_plain_torch_computes_chat_by_chat(models, score, temperature, kl):
    chosen = () if kl == "exact" else ("--estimator", kl)
    options = ("--temperature", temperature, "--forward-kl", "--max-tokens-per-batch", 700)
    code, out = score(CHATS, *options, *chosen)
    assert code == 0
    tokens, chats = rows(out / "tokens.parquet"), rows(out / "chats.parquet")
    assert [row["chat"] for row in chats] == list(range(1, len(chats) + 1))
    assert len(chats) >= 40
    by_chat = {row["chat"]: [t for t in tokens if t["chat"] == row["chat"]] for row in chats}
    drift = 0.0
    for record in read_records(CHATS).rows[::5]:
        messages = parse_chats(record)[0].messages
        own = by_chat[record.line]
        ids, log_p = log_softmax(models.policy, messages, temperature)
        log_q = log_softmax(models.reference, messages, temperature)[1]
        p, q, one = log_p.exp(), log_q.exp(), ids[1:, None]
        policy, reference = log_p.gather(-1, one)[:, 0], log_q.gather(-1, one)[:, 0]
        at = torch.tensor([t["position"] for t in own]) - 1
        of_kl = {
            "exact": (p * (log_p - log_q)).sum(-1)[at],
            "k1": (policy - reference)[at],
            "k3": ((reference - policy).exp() - 1 - (reference - policy))[at],
        }
        expected = {
            "token": ids[at + 1],
            "policy_log_prob": policy[at],
            "reference_log_prob": reference[at],
            "entropy": -(p * log_p).sum(-1)[at],
            "reference_entropy": -(q * log_q).sum(-1)[at],
            "kl": of_kl[kl],
            "kl_forward": (q * (log_q - log_p)).sum(-1)[at],
            "kl_k1": of_kl["k1"],
            "kl_k3": of_kl["k3"],
        }
        for name, values in expected.items():
            got = torch.tensor([t[name] for t in own], dtype=values.dtype)
            atol = 2e-5 if "log_prob" in name or "k" in name[-2:] else 1e-5
            torch.testing.assert_close(got, values, atol=atol, rtol=1e-5, msg=name)
        row = chats[record.line - 1]
        assert row["length"] == len(ids)
        assert row["scored_tokens"] == len(own)
        assert row["kl_total"] == pytest.approx(expected["kl"].sum().item(), abs=1e-3)
        for name in ("kl", "kl_forward", "entropy", "reference_entropy"):
            assert row[f"{name}_mean"] == pytest.approx(expected[name].mean().item(), abs=1e-4)
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
    summary = score_chats(CHATS, models.policy, models.reference, tmp_path)
    tokens = rows(tmp_path / "tokens.parquet")
    assert summary.mean("kl_mean") == pytest.approx(
        math.fsum(t["kl"] for t in tokens) / len(tokens), rel=1e-6
    )
    assert all(t["kl"] >= 0 and t["kl_forward"] is None for t in tokens)


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
