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
from fusedrl.scoring import job

from .conftest import chat

pytestmark = pytest.mark.heavy

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


PAGE = Path(__file__).parents[2] / "docs/tutorials/score-your-chats.md"


def test_the_tutorial_shows_what_is_printed(models, tmp_path, monkeypatch, capsys):
    chats = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(chats[1])
    arguments = ["--policy", models.policy, "--reference", models.reference, "--out", "drift"]
    assert main(["score", "chats.jsonl", *arguments]) == 0
    assert_prints(texts(PAGE, "console"), capsys.readouterr().out, figures=False)
