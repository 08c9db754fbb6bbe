"""What `fusedrl score` says of its work besides the results."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from shown import assert_prints, texts

from fusedrl.cli import alive, main
from fusedrl.scoring import job, report
from fusedrl.scoring.inputs import hub_names

from .conftest import chat

CHATS = [chat("Hi", f"Hello {n}!") for n in range(3)]


def test_a_log_without_a_terminal_is_told_that_work_goes_on(
    score, write_chats, monkeypatch, capsys
):
    monkeypatch.setattr(alive, "EVERY", 0.05)
    publish = job.publish

    def slow(*args):
        time.sleep(0.3)
        return publish(*args)

    monkeypatch.setattr(job, "publish", slow)
    assert score(write_chats(*CHATS))[0] == 0
    said = capsys.readouterr().err
    assert re.search(r"^score: loading the models, running for \d+ s$", said, re.MULTILINE)
    assert re.search(r"^score: 3 of 3 chats, running for \d+ s$", said, re.MULTILINE)


def test_a_terminal_gets_no_line(monkeypatch, capsys):
    monkeypatch.setattr(alive, "EVERY", 0.01)
    with alive.told("score", lambda: "at work", terminal=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "said"), [(39.6, "40 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_read_as_a_reader_says_them(seconds, said):
    assert alive.duration(seconds) == said


def test_a_name_that_is_no_folder_is_said_once(tmp_path):
    assert hub_names(str(tmp_path), str(tmp_path)) == []
    assert hub_names("owner/name", str(tmp_path)) == [
        "policy: there is no folder 'owner/name' here, so the hub is asked for it"
    ]
    (both,) = hub_names("gpt", "gpt")
    assert both.startswith("policy and reference: there is no folder 'gpt' here")


def test_a_result_that_replaces_another_says_so(score, write_chats, capsys):
    path = write_chats(*CHATS)
    _, out = score(path)
    assert "replaced" not in capsys.readouterr().out
    score(path)
    said = capsys.readouterr().out
    assert f"replaced tokens.parquet, chats.parquet, report.html of an earlier job in {out}" in said


def test_a_report_that_the_limit_of_tokens_cut_says_so(score, write_chats, monkeypatch, capsys):
    path = write_chats(*CHATS)
    score(path)
    assert "report.html shows" not in capsys.readouterr().out
    monkeypatch.setattr(report, "MAX_TOKENS", 2)
    score(path, "--report-chats", 2)
    said = capsys.readouterr().out
    assert "report.html shows 1 of 2 chats: a page has at most 2 tokens" in said


def test_one_is_one(score, write_chats, capsys):
    path = write_chats(CHATS[0], "{broken")
    _, out = score(path)
    assert "1 chat scored, 1 skipped" in capsys.readouterr().out
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "1 chat was skipped" in page
    assert "1 chats" not in page


def test_the_means_of_both_answers_are_said(score, write_chats, capsys):
    score(write_chats({"prompt": "Hi", "chosen": "Hello!", "rejected": "No."}))
    said = capsys.readouterr().out
    assert re.search(r"^chosen: 1 chat, mean KL \d", said, re.MULTILINE)
    assert re.search(r"^rejected: 1 chat, mean KL \d", said, re.MULTILINE)


PAGE = Path(__file__).parents[2] / "docs/tutorials/score-your-chats.md"


def test_the_tutorial_shows_what_is_printed(models, tmp_path, monkeypatch, capsys):
    chats = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(chats[1])
    arguments = ["--policy", models.policy, "--reference", models.reference, "--out", "drift"]
    assert main(["score", "chats.jsonl", *arguments]) == 0
    assert_prints(texts(PAGE, "console"), capsys.readouterr().out, figures=False)
