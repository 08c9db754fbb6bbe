"""What a scoring job leaves behind: three whole files, or nothing, however it ends."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from pyarrow import parquet

from fusedrl.cli import main
from fusedrl.demo import CHATS
from fusedrl.scoring import job, output, score_chats

from .conftest import chat

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("default_signals")]

OUTPUTS = {"tokens.parquet", "chats.parquet", "report.html"}
GOOD = chat("Hi", "Hello!")
OTHER = chat("Hi", "Hello again!")
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


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


def interrupting(number, function):
    def run(*args, **options):
        signal.raise_signal(number)
        return function(*args, **options)

    return run


PHASES = {
    "making the directory": (output, "_remove_abandoned"),
    "loading": (job, "load_pair"),
    "tokenizing": (job, "tokenize_chat"),
    "scoring": (job, "score_batch"),
    "writing a table": (job.Tables, "write"),
    "rendering": (job.HtmlReport, "write"),
    "moving the files": (job, "publish"),
}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_the_job_and_leaves_nothing_unfinished(
    earlier, write_chats, score, monkeypatch, capsys, number, phase
):
    out, before = earlier
    handlers = [signal.getsignal(n) for n in SIGNALS]
    owner, name = PHASES[phase]
    monkeypatch.setattr(owner, name, interrupting(number, getattr(owner, name)))
    code, _ = score(write_chats(OTHER))
    assert code == 128 + number
    said = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    assert f"score: {said}" in capsys.readouterr().err
    assert contents(out) == before
    assert [signal.getsignal(n) for n in SIGNALS] == handlers


@pytest.mark.parametrize("number", [signal.SIGINT])
@pytest.mark.parametrize("moment", ["between two files", "while cleaning up"])
def test_a_signal_waits_where_it_would_leave_half(
    earlier, write_chats, score, monkeypatch, number, moment
):
    out, before = earlier
    owner, name = (Path, "replace") if moment == "between two files" else (output, "_remove")
    monkeypatch.setattr(owner, name, interrupting(number, getattr(owner, name)))
    code, _ = score(write_chats(OTHER))
    assert code == 128 + number
    after = contents(out)
    assert set(after) == OUTPUTS
    assert all(after[file] != before[file] for file in OUTPUTS)


def test_a_job_runs_in_a_thread_that_takes_no_signals(models, write_chats, tmp_path):
    path, done = write_chats(GOOD), []
    thread = threading.Thread(
        target=lambda: done.append(score_chats(path, *models, tmp_path / "out"))
    )
    thread.start()
    thread.join()
    assert len(done[0].rows) == 1
    assert set(contents(tmp_path / "out")) == OUTPUTS


def job_that_waits(arguments, ready):
    """A job of a process of its own that never gets its models."""

    def wait(*args):
        ready.set()
        signal.pause()

    job.load_pair = wait
    sys.exit(main(arguments))


def test_what_a_killed_job_leaves_is_removed_and_what_a_live_one_has_is_not(
    models, write_chats, score, tmp_path
):
    path, out = write_chats(GOOD), tmp_path / "out"
    arguments = ["score", str(path), "--policy", models.policy, "--reference", models.reference]
    fork = multiprocessing.get_context("fork")  # The modules are imported already.
    ready = [fork.Event(), fork.Event()]
    jobs = [
        fork.Process(target=job_that_waits, args=([*arguments, "--out", str(out)], event))
        for event in ready
    ]
    try:
        for process in jobs:
            process.start()
        assert all(event.wait(60) for event in ready)
        assert len(list(out.glob(".unfinished-*"))) == 2
        assert score(path)[0] == 0
        assert len(list(out.glob(".unfinished-*"))) == 2
        jobs[0].terminate()
        jobs[0].join()
        assert jobs[0].exitcode == 128 + signal.SIGTERM
        (left,) = out.glob(".unfinished-*")
        jobs[1].kill()
        jobs[1].join()
        assert jobs[1].exitcode == -signal.SIGKILL
        assert left.exists()
        assert score(path)[0] == 0
        assert set(contents(out)) == OUTPUTS
    finally:
        for process in jobs:
            process.kill()
            process.join()


def test_the_next_job_removes_only_what_a_dead_one_wrote(write_chats, score, tmp_path):
    out = tmp_path / "out"
    dead, alive, foreign = (out / f".unfinished-{name}" for name in ("dead", "alive", "thesis"))
    for folder in (dead, alive, foreign):
        folder.mkdir(parents=True)
        (folder / "tokens.parquet").write_bytes(b"half")
    (foreign / "chapter.tex").write_text("mine")
    (out / ".unfinished-note").write_text("mine")
    (out / ".unfinished-link").symlink_to(tmp_path)
    lock = os.open(alive, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        assert score(write_chats(GOOD))[0] == 0
    finally:
        os.close(lock)
    assert not dead.exists()
    assert (alive / "tokens.parquet").read_bytes() == b"half"
    assert (foreign / "chapter.tex").read_text() == "mine"
    kept = {".unfinished-alive", ".unfinished-thesis", ".unfinished-note", ".unfinished-link"}
    assert {path.name for path in out.iterdir()} == kept | OUTPUTS


def test_files_of_two_jobs_cannot_mix(write_chats, score, tmp_path, monkeypatch):
    real, busy = Path.replace, []

    def replace(path, target):
        other = os.open(tmp_path / "out", os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy.append(target.name)
        finally:
            os.close(other)
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    assert score(write_chats(GOOD))[0] == 0
    assert set(busy) == OUTPUTS


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["tokens.parquet", "report.html"])
def test_a_full_disk_is_named_and_leaves_the_earlier_files_alone(
    earlier, write_chats, score, monkeypatch, capsys, recwarn, name
):
    out, before = earlier
    real = tempfile.mkdtemp

    def with_a_full_file(**options):
        folder = Path(real(**options))
        (folder / name).symlink_to("/dev/full")
        return str(folder)

    monkeypatch.setattr(output.tempfile, "mkdtemp", with_a_full_file)
    code, _ = score(write_chats(*[OTHER] * 40))
    assert code == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].endswith(f"{name}: No space left on device; free some space there")
    assert "Traceback" not in "".join(said)
    assert contents(out) == before
    assert not [str(w.message) for w in recwarn if "unraisable" in type(w.message).__name__.lower()]


def run(models, path, out):
    pair = ["--policy", models.policy, "--reference", models.reference]
    return main(["score", str(path), *pair, "--out", str(out)])


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("taken", "expected a directory or a new name, got the file"),
        ("taken/below", "Not a directory"),
        ("link", "File exists"),
        ("x" * 300, "File name too long"),
        ("/proc/fusedrl", "choose a directory that can be written"),
        ("/dev/null", "got the file"),
        ("/dev/null/below", "Not a directory"),
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
    assert "would replace the input; choose another directory" in capsys.readouterr().err
    assert path.read_bytes() == before
