"""What a scoring job leaves behind: three whole files, or nothing, however it ends."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from pyarrow import parquet

from fusedrl.cli import main
from fusedrl.demo import CHATS
from fusedrl.scoring import job, output

from .conftest import chat

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("default_signals")]

OUTPUTS = {"tokens.parquet", "chats.parquet", "report.html"}
GOOD = chat("Hi", "Hello!")
OTHER = chat("Hi", "Hello again!")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def earlier(write_chats, score):
    """The output directory of a job that is done, and what is in it."""
    code, out = score(write_chats(GOOD))
    assert code == 0
    before = contents(out)
    assert set(before) == OUTPUTS
    return out, before


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_job_that_fails_midway_leaves_the_earlier_files_alone(score, monkeypatch, failure):
    code, out = score(CHATS)
    assert code == 0
    before = contents(out)
    real, calls = job.score_batch, []
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
    assert contents(out) == before


PHASES = {
    "loading": (job, "load_pair"),
    "tokenizing": (job, "tokenize_chat"),
    "scoring": (job, "score_batch"),
    "writing a table": (job.Tables, "write"),
    "rendering": (job.HtmlReport, "write"),
    "moving the files": (Path, "replace"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_the_job_and_leaves_nothing_unfinished(
    earlier, write_chats, score, monkeypatch, capsys, phase
):
    out, before = earlier

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(*PHASES[phase], interrupted)
    assert score(write_chats(OTHER))[0] == 130
    assert "score: interrupted" in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["tokens.parquet", "report.html"])
def test_a_full_disk_is_named_and_leaves_the_earlier_files_alone(
    earlier, write_chats, score, monkeypatch, capsys, recwarn, name
):
    out, before = earlier
    real = tempfile.mkdtemp

    def with_a_full_file(*where):
        folder = Path(real(*where))
        (folder / name).symlink_to("/dev/full")
        return str(folder)

    monkeypatch.setattr(output.tempfile, "mkdtemp", with_a_full_file)
    code, _ = score(write_chats(*[OTHER] * 40))
    assert code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith(f"{name}: No space left on device; free some disk space")
    assert "Traceback" not in "".join(said)
    assert contents(out) == before
    assert not [str(w.message) for w in recwarn if "unraisable" in type(w.message).__name__.lower()]


def run(models, path, out):
    pair = ["--policy", models.policy, "--reference", models.reference]
    return main(["score", str(path), *pair, "--out", str(out)])


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("taken", "File exists"),
        ("taken/below", "Not a directory"),
        ("link", "File exists"),
        ("/proc/fusedrl", "choose a writable directory"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_and_kept(
    models, write_chats, tmp_path, monkeypatch, capsys, place, why
):
    monkeypatch.setattr(job, "load_pair", None)  # what comes after would take minutes
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "there")
    assert run(models, write_chats(GOOD), tmp_path / place) == 2
    said = capsys.readouterr().err
    assert "score: out: " in said
    assert why in said
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("linked", [False, True])
def test_the_input_is_never_replaced(models, tmp_path, capsys, linked):
    import pyarrow

    path = tmp_path / "chats.parquet"
    parquet.write_table(pyarrow.table({"messages": [GOOD["messages"]]}), path)
    before = path.read_bytes()
    given = tmp_path / "link.parquet" if linked else path
    if linked:
        given.symlink_to(path)
    assert run(models, given, tmp_path) == 2
    assert "would overwrite input; choose another directory" in capsys.readouterr().err
    assert path.read_bytes() == before
