"""The demo's models: saved for from_pretrained, and apart from each other after training."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusedrl.cli import main
from fusedrl.demo import models as demo_models


def test_demo_trains_saves_and_scores(tmp_path, monkeypatch, capsys):
    make = demo_models.make_models
    monkeypatch.setattr(
        "fusedrl.cli.demo.make_models",
        lambda policy, reference: make(policy, reference, pretrain_steps=8, tune_steps=4),
    )
    assert main(["demo", "--out", str(tmp_path / "demo-out")]) == 0
    assert "50 chats scored, 0 skipped" in capsys.readouterr().out
    chats = parquet.read_table(tmp_path / "demo-out" / "chats.parquet").to_pylist()
    # What the policy was tuned on became likelier.
    tuned = chats[::2]
    assert sum(c["policy_log_prob"] - c["reference_log_prob"] for c in tuned) > 0.1
    assert (tmp_path / "demo-out" / "report.html").is_file()


@pytest.mark.parametrize("place", ["taken", "taken/below", "/proc/fusedrl"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys, place):
    (tmp_path / "taken").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / place)]) == 2
    assert f"demo: out: cannot write {tmp_path / place}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), Exception("No space left (os error 28)")]
)
def test_a_full_disk_is_named(tmp_path, monkeypatch, capsys, failure):
    def full(*args):
        raise failure

    monkeypatch.setattr("fusedrl.cli.demo.make_models", full)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    assert "No space left" in capsys.readouterr().err


def test_same_seed_same_models(tmp_path):
    for name in ("a", "b"):
        demo_models.make_models(
            tmp_path / name, tmp_path / f"{name}-reference", pretrain_steps=2, tune_steps=1, seed=3
        )
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("a", "b")
    )
    assert all(first[key].allclose(second[key], atol=1e-5) for key in first)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").eos_token == "<|im_end|>"
