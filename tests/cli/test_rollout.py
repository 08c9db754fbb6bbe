"""Chats with the log-probs of the engine that generated them: how far the policy is from it."""

from __future__ import annotations

import json
import math

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")


from fusedrl.demo import CHATS
from fusedrl.scoring import score_chats

from .conftest import chat, rows
from .test_report import Page

pytestmark = pytest.mark.heavy

COLUMNS = ("tokens", "k1", "k3", "ess", "max_ratio", "clipped")


@pytest.fixture
def scored_chats(score):
    """The first bundled chats, and for each the rows of its scored tokens."""
    first = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()[:6]]

    def run(write_chats):
        _, out = score(write_chats(*first))
        tokens = rows(out / "tokens.parquet")
        lengths = [row["length"] for row in rows(out / "chats.parquet")]
        own = [[t for t in tokens if t["chat"] == n] for n in range(1, len(first) + 1)]
        return first, own, lengths

    return run


def shifted(tokens, step=0.2):
    """Rollout log-probs that lie above and below the policy's."""
    return [t["policy_log_prob"] + step * math.sin(1 + 2 * i) for i, t in enumerate(tokens)]


def with_rollouts(scored_chats, write_chats):
    """Chats with a list a scored token, with one a token, with a null, and without any."""
    chats, own, lengths = scored_chats(write_chats)
    given = [shifted(tokens) for tokens in own]
    lines = [dict(row) for row in chats]
    lines[0]["rollout_log_probs"] = given[0]
    whole = [None] * lengths[1]
    for token, value in zip(own[1], given[1], strict=True):
        whole[token["position"]] = value
    lines[1]["rollout_log_probs"] = whole
    given[2][3] = None
    lines[2]["rollout_log_probs"] = given[2]
    lines[3]["rollout_log_probs"] = None
    given[3] = given[4] = given[5] = None
    return lines, own, given


def expected(tokens, given, bound=2.0):
    """The mismatch of one chat in float64, from what the tables say of the policy."""
    policy = torch.tensor([t["policy_log_prob"] for t in tokens], dtype=torch.float64)
    rollout = torch.tensor([math.nan if x is None else x for x in given], dtype=torch.float64)
    d = (policy - rollout)[~rollout.isnan()]
    ratio = d.exp()
    weights = ratio.clamp(max=bound)
    return {
        "tokens": len(d),
        "k1": -d.mean().item(),
        "k3": (d.exp() - 1 - d).mean().item(),
        "ess": (weights.sum() ** 2 / weights.square().sum()).item(),
        "max_ratio": ratio.max().item(),
        "clipped": (ratio > bound).double().mean().item(),
    }


def test_tables_hold_the_mismatch_of_each_chat(scored_chats, write_chats, score):
    lines, own, given = with_rollouts(scored_chats, write_chats)
    code, out = score(write_chats(*lines), "--rollout-bound", 1.1)
    assert code == 0
    tokens, chats = rows(out / "tokens.parquet"), rows(out / "chats.parquet")
    for number, (row, values) in enumerate(zip(chats, given, strict=True), start=1):
        found = [t["rollout_log_prob"] for t in tokens if t["chat"] == number]
        if values is None:
            assert found == [None] * len(own[number - 1])
            assert all(row[f"rollout_{name}"] is None for name in COLUMNS)
            continue
        assert found == [x if x is None else pytest.approx(x, abs=1e-6) for x in values]
        for name, value in expected(own[number - 1], values, 1.1).items():
            assert row[f"rollout_{name}"] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert 0 < chats[0]["rollout_clipped"] < 1
    assert chats[2]["rollout_tokens"] == chats[2]["scored_tokens"] - 1


def test_the_summary_and_the_page_show_the_total(scored_chats, write_chats, score, models, capsys):
    lines, own, given = with_rollouts(scored_chats, write_chats)
    path = write_chats(*lines)
    capsys.readouterr()
    _, out = score(path)
    total = expected([*own[0], *own[1], *own[2]], [*given[0], *given[1], *given[2]])
    shown = capsys.readouterr().out
    assert "3 chats with rollout log-probs" in shown
    assert f"k1 {total['k1']:.4f}, k3 {total['k3']:.4f}" in shown
    summary = score_chats(path, models.policy, models.reference, out)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    for name in COLUMNS:
        assert page.data["mismatch"][name] == pytest.approx(total[name], rel=1e-4), name
        assert float(getattr(summary.mismatch, name)) == pytest.approx(total[name], rel=1e-4)
    assert "Mismatch between engine and trainer" in page.text
    assert f"{total['k3']:.3g}" in page.text
    assert "rollout" in [view["key"] for view in page.data["views"]]
    cells = [cell for m in page.data["chats"] for x in m["messages"] for cell in x["cells"] or []]
    assert sum("rollout" in cell["values"] for cell in cells) > 10
    assert sum("rollout" not in cell["values"] for cell in cells) > 10


GOOD = chat("Hi", "Hello!")
BAD = {
    "a number": (-0.5, "rollout_log_probs: expected a list of numbers, got -0.5"),
    "text in the list": ([-0.5, "a"], "rollout_log_probs[1]: expected a log-prob, a number of at"),
    "probabilities": ([0.93], "rollout_log_probs[0]: expected a log-prob, a number of at most 0 "),
    "infinity": ([math.inf], "rollout_log_probs[0]: expected a log-prob"),
    "too few": ([-0.5], "rollout_log_probs: expected "),
    "too many": ([-0.5] * 1000, ", got 1000"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_list_leaves_its_chat_out(name, write_chats, score, capsys):
    value, message = BAD[name]
    code, out = score(write_chats(GOOD, GOOD | {"rollout_log_probs": value}, GOOD))
    assert code == 1
    assert [row["chat"] for row in rows(out / "chats.parquet")] == [1, 3]
    errors = capsys.readouterr().err
    assert "chats.jsonl:2: rollout_log_probs" in errors
    assert message in errors
    assert message[:40] in Page((out / "report.html").read_text(encoding="utf-8")).text


def test_a_token_that_the_engine_gives_no_probability_is_a_number(write_chats, score):
    _, out = score(write_chats(GOOD))
    count = rows(out / "chats.parquet")[0]["scored_tokens"]
    given = json.dumps(GOOD | {"rollout_log_probs": [-0.5] * (count - 2) + ["LOW", "NAN"]})
    line = given.replace('"LOW"', "-Infinity").replace('"NAN"', "NaN")
    code, out = score(write_chats(line))
    assert code == 0
    (row,) = rows(out / "chats.parquet")
    assert row["rollout_tokens"] == count - 1
    assert row["rollout_max_ratio"] == pytest.approx(math.exp(20), rel=1e-5)
    assert row["rollout_k3"] == math.inf
