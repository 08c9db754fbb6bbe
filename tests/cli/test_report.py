"""report.html: self-contained, escaped, capped, and drawn by a real browser."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy
import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from fusedrl.demo import CHATS
from fusedrl.scoring import Settings, job, report, score_chats, tables
from fusedrl.scoring.batch_scores import ScoredChat
from fusedrl.scoring.chats import Chat
from fusedrl.scoring.tables import chat_row
from fusedrl.scoring.tokenization import TokenizedChat

from .conftest import chat, rows

pytestmark = pytest.mark.heavy

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium or google-chrome on PATH to draw the page with"
)
HOSTILE = "<script>document.title='owned'</script> & \"quotes\" </i></script><b>bold"


class Page(HTMLParser):
    """The tags, the cells' texts and the embedded JSON of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.cells, self.json, self.text = [], [], "", ""
        self._open = []
        self.feed(html)
        self.data = json.loads(self.json)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append((tag, dict(attrs)))
        if tag == "i":
            self.cells.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attrs = self._open[-1] if self._open else ("", {})
        if attrs.get("id") == "data":
            self.json += data
        elif tag not in ("script", "style"):
            self.text += data
        if tag == "i":
            self.cells[-1] += data


def draw(path, tmp_path, *options):
    """The document after chromium has run its scripts."""
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync"
    more = "--disable-background-networking --disable-component-update"
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run(
        [CHROMIUM, *flags.split(), *more.split(), profile, *options, "--dump-dom", path.as_uri()],
        capture_output=True,
        timeout=120,
        check=True,
    )
    return done.stdout.decode()


@pytest.fixture(scope="module")
def page_path(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    lines = [json.dumps(chat("Escape this.", HOSTILE)), CHATS.read_text(encoding="utf-8").strip()]
    (folder / "chats.jsonl").write_text("\n".join([*lines, "{broken"]), encoding="utf-8")
    settings = Settings(report_chats=100)
    score_chats(folder / "chats.jsonl", models.policy, models.reference, folder, settings)
    return folder / "report.html"


def test_page_needs_nothing_from_outside(page_path):
    page = Page(page_path.read_text(encoding="utf-8"))
    for tag, attrs in page.tags:
        assert tag not in {"link", "img", "iframe", "object"}
        assert not {"src", "href"} & attrs.keys()
    code = re.findall(r"<(?:style|script)>(.*?)</", page_path.read_text(encoding="utf-8"), re.S)
    assert len(code) == 2
    for remote in ("url(", "import", "fetch(", "http"):
        assert not any(remote in text for text in code)


def test_cells_and_data_say_what_the_tables_say(page_path):
    from pyarrow import parquet

    page = Page(page_path.read_text(encoding="utf-8"))
    tokens = parquet.read_table(page_path.with_name("tokens.parquet")).to_pylist()
    assert sorted(page.cells) == sorted(report.visible(t["text"]) for t in tokens if t["text"])
    drift = [shown["kl_mean"] for shown in page.data["chats"]]
    assert drift == sorted(drift, reverse=True)
    for shown in page.data["chats"]:
        own = [t for t in tokens if t["chat"] == shown["chat"]]
        cells = [cell for message in shown["messages"] for cell in message["cells"] or []]
        assert sum(cell["tokens"] for cell in cells) == len(own)
        for key, column in (("exact", "kl"), ("k1", "kl_k1"), ("k3", "kl_k3")):
            total = sum(cell["values"][key] for cell in cells)
            assert total == pytest.approx(sum(t[column] for t in own), abs=1e-3)


def test_chat_text_is_escaped(page_path):
    html = page_path.read_text(encoding="utf-8")
    assert "<script>document.title" not in html
    assert HOSTILE in "".join(Page(html).cells)


def test_marks_that_nobody_sees_are_shown(write_chats, score):
    """The direction of a text, and a token of no width; joiners in a word are left as they are."""
    said = "a\u202e<|dne_mi|>b \u200b \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    _, out = score(write_chats(chat("left \u2066right", said)))
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    shown = "".join(page.cells)
    assert r"a\u202e<|dne_mi|>b" in shown
    assert r"\u200b" in page.cells
    assert "\u200c" in shown or r"\u200c" in page.cells  # by the tokens of the word
    assert r"left \u2066right" in page.text
    assert not re.search("[\u202e\u2066\u200b]", page.text + shown)
    [row] = {row["text"] for row in rows(out / "tokens.parquet") if "\u202e" in row["text"]}
    assert row == "\u202e"


def test_a_long_input_shows_its_most_drifted_chats_only(score):
    _, out = score(CHATS, "--report-chats", 3)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert "The 3 most-drifted of 50 chats" in page.text
    assert len(page.data["chats"]) == 3


def test_a_page_ends_at_its_limit_of_tokens_and_says_so(score, monkeypatch):
    monkeypatch.setattr(report, "MAX_TOKENS", 10)
    _, out = score(CHATS, "--report-chats", 3)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert len(page.cells) <= 10
    assert re.search(r"[1-9]\d* more scored tokens of this chat are in tokens.parquet", page.text)
    assert "The page shows at most 10 tokens." in page.text


def test_values_that_are_not_finite_are_shown(tmp_path):
    conversation = Chat("c.jsonl:1", 1, [{"role": "assistant", "content": "a b"}], None)
    values = numpy.array([numpy.nan, numpy.inf], dtype=numpy.float32)
    scored = ScoredChat(
        TokenizedChat(conversation, [1, 2, 3], ["", "a", " b"], [-1, 0, 0]),
        numpy.array([1, 2]),
        values,
        values,
        values,
        values,
        {"exact": values, "forward": values, "k1": values, "k3": values},
    )
    made = report.HtmlReport({"policy": "p", "reference": "r"}, 5)
    row = chat_row(scored)
    made.add(row, scored)
    made.write(tmp_path / "report.html", [row], job.Summary([row]).figures(), [])
    with tables.Tables(tmp_path, {}) as written:
        written.write(scored)
    told = rows(tmp_path / "tokens.parquet")
    assert [math.isnan(token["kl_forward"]) for token in told] == [True, False]
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.cells == ["a", " b"]
    cells = page.data["chats"][0]["messages"][0]["cells"]
    assert [cell["values"]["exact"] for cell in cells] == [None, None]


@pytest.mark.slow
@needs_chromium
def test_chromium_draws_the_page(page_path, tmp_path):
    from pyarrow import parquet

    drawn = draw(page_path, tmp_path)
    page = Page(drawn)
    tokens = parquet.read_table(page_path.with_name("tokens.parquet")).to_pylist()
    assert len(page.cells) == sum(t["text"] != "" for t in tokens)
    assert "<title>Drift of" in drawn
    assert sum(tag == "rect" for tag, _ in page.tags) > 10
    controls = next(a for tag, a in page.tags if tag == "div" and a.get("class") == "controls")
    assert "hidden" not in controls, "the page's script must have run to its end"
    assert "おはようございます" in "".join(page.cells)


@pytest.mark.slow
@needs_chromium
def test_controls_recolour_sort_and_filter(page_path, tmp_path):
    use = """<script>
    for (const [id, value, event] of [["view", "k1", "change"], ["sort", "chat", "change"],
                                      ["filter", "haiku", "input"]]) {
      const control = document.getElementById(id);
      control.value = value;
      control.dispatchEvent(new Event(event));
    }
    </script>"""
    copy = tmp_path / "used.html"
    copy.write_text(page_path.read_text(encoding="utf-8") + use, encoding="utf-8")
    page = Page(draw(copy, tmp_path))
    cards = [a for tag, a in page.tags if tag == "details" and "chat" in a.get("class", "")]
    lines = [page.data["chats"][int(card["data-index"])]["chat"] for card in cards]
    assert lines == sorted(lines)
    shown = [line for line, card in zip(lines, cards, strict=True) if "hidden" not in card]
    rows = CHATS.read_text(encoding="utf-8").splitlines()
    assert shown == [2 + i for i, row in enumerate(rows) if "haiku" in row]
    order = [page.data["chats"][int(card["data-index"])] for card in cards]
    values = [
        cell["values"]["k1"]
        for shown in order
        for message in shown["messages"]
        for cell in message["cells"] or []
    ]
    below = ["below" in a.get("class", "") for tag, a in page.tags if tag == "i"]
    assert below == [value < 0 for value in values]
    assert 0 < sum(below) < len(below)
