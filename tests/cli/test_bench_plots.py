"""`fusedrl bench --plots`: which comparisons are drawn, from what was measured or stored."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason='needs pip install "fusedrl[bench]"')

from fusedrl.benchmarks import headlines, results
from fusedrl.benchmarks.harness import Row

from fusedrl.cli import main

STORED = sorted(
    path
    for path in (Path(__file__).parents[2] / "benchmarks" / "results").glob("*/*.json")
    if path.stem != "soak_collectors"
)
FACTS = {
    "machine": {
        "versions": {"torch": "9.1", "torchrl": "8.2"},
        "machine": {"cpu": "A CPU", "cpu capability (torch)": "AVX2"},
    },
    "threads": 2,
    "device": "cpu",
}


def rows(setting="8 samples, lazy stack", ms=(60.0, 10.0), correct=True):
    op, (theirs, ours) = "KLComputation", ms
    return [
        Row(op, setting, "torchrl", median_ms=theirs, speedup=theirs / ours, peak_extra_mib=900.0),
        Row(
            op, setting, "fusedrl", median_ms=ours, speedup=1.0, peak_extra_mib=2.0, correct=correct
        ),
    ]


def store(path, measured):
    results.Results(FACTS, rows=measured).write(path)
    return path


def plot(folder, *files):
    return main(["bench", "--plots", str(folder), "--from", *map(str, files)])


def texts(path):
    """The texts of an SVG, which must be well-formed."""
    return [text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip()]


def test_a_stored_file_is_drawn_for_light_and_for_dark_pages(tmp_path, capsys):
    assert plot(tmp_path / "plots", store(tmp_path / "bench.json", rows())) == 0
    drawn = {path.name for path in (tmp_path / "plots").iterdir()}
    pages = ("light", "dark")
    assert drawn == {
        f"{name}-{page}.svg" for name in ("comparison", "klcomputation") for page in pages
    }
    shown = texts(tmp_path / "plots" / "comparison-light.svg")
    assert shown == texts(tmp_path / "plots" / "comparison-dark.svg")
    assert "6.0x" in shown
    assert "60 ms → 10 ms,  900 MiB → 2 MiB" in shown
    assert "KL-penalised rewards from log-probs" in shown
    assert "A CPU with AVX2, 2 threads, torch 9.1, torchrl 8.2" in " ".join(shown)
    assert "wrote 4 plots" in capsys.readouterr().out


def test_a_setting_with_a_wrong_answer_of_ours_is_not_drawn(tmp_path):
    right = rows("8 samples, lazy stack", (30.0, 10.0))
    wrong = rows("64 samples, lazy stack", correct=False)
    stored = store(tmp_path / "bench.json", right + wrong)
    assert plot(tmp_path / "plots", stored) == 0
    assert "3.0x" in texts(tmp_path / "plots" / "comparison-light.svg")
    for path in (tmp_path / "plots").iterdir():
        assert "6.0x" not in texts(path)


def test_of_several_settings_that_in_which_the_rival_takes_longest_is_shown():
    measured = rows("8 samples, lazy stack", (30.0, 10.0)) + rows("64 samples, lazy stack")
    (shown,) = headlines.comparisons(reversed(measured))
    assert shown.detail.startswith("vs. torchrl's KLComputation: 64 samples")
    assert shown.speedup == 6.0


def test_every_headline_is_in_the_stored_results():
    """A benchmark whose settings are renamed would drop out of the comparison in silence."""
    stored = [row for path in STORED for row in results.read(path).trusted]
    shown = {one.title for one in headlines.comparisons(stored)}
    assert shown == {headline.title for headline in headlines.HEADLINES}


@pytest.mark.parametrize("content", ["not JSON", "[]", '{"rows": [{"op": "a"}]}'])
def test_a_file_of_something_else_is_refused(tmp_path, capsys, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    assert plot(tmp_path / "plots", path) == 2
    error = capsys.readouterr().err
    assert re.match(f"bench: --from: {re.escape(str(path))}: expected a bench.json", error)
    assert not (tmp_path / "plots").exists()
