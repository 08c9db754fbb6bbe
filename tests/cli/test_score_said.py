"""What `fusedrl score` says of its work besides the results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from shown import assert_prints, texts

from fusedrl.cli import main

pytestmark = pytest.mark.heavy

PAGE = Path(__file__).parents[2] / "docs/tutorials/score-your-chats.md"


def test_the_tutorial_shows_what_is_printed(models, tmp_path, monkeypatch, capsys):
    chats = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text(chats[1])
    arguments = ["--policy", models.policy, "--reference", models.reference, "--out", "drift"]
    assert main(["score", "chats.jsonl", *arguments]) == 0
    assert_prints(texts(PAGE, "console"), capsys.readouterr().out, figures=False)
