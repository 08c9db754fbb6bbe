"""What a scoring job leaves behind: three whole files, or nothing, however it ends."""

from __future__ import annotations

import errno
import fcntl
import io
import json
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
from rich.progress import Progress

from fusedrl.cli import main
from fusedrl.demo import CHATS
from fusedrl.scoring import ScoreError, job, output, score_chats, signals

from .conftest import chat

pytestmark = pytest.mark.usefixtures("default_signals")

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


def test_a_summary_that_cannot_be_written_leaves_the_files(score, write_chats, monkeypatch, capsys):
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, out = score(write_chats(GOOD))
    assert code == 2
    assert capsys.readouterr().err.endswith("score: cannot write output: No space left on device\n")
    assert set(contents(out)) == OUTPUTS


@pytest.mark.parametrize("number", SIGNALS)
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


@pytest.mark.parametrize("number", SIGNALS)
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


def test_a_terminal_that_hangs_up_ends_the_job_like_any_signal(
    write_chats, score, monkeypatch, tmp_path
):
    def hung_up(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Progress, "stop", hung_up)
    monkeypatch.setattr(job, "load_pair", interrupting(signal.SIGHUP, job.load_pair))
    assert score(write_chats(GOOD))[0] == 128 + signal.SIGHUP
    assert not (tmp_path / "out").exists()


def test_an_ignored_signal_stays_ignored(write_chats, score, monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(job, "load_pair", interrupting(signal.SIGHUP, job.load_pair))
        assert score(write_chats(GOOD))[0] == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_of_the_program_is_kept():
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with signals.raised(), signals.held():
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


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


def test_without_locks_nothing_of_others_is_removed(write_chats, score, tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output.fcntl, "flock", no_locks)
    other = tmp_path / "out" / ".unfinished-other"
    other.mkdir(parents=True)
    assert score(write_chats(GOOD))[0] == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {other.name} | OUTPUTS


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


def test_jobs_that_share_a_directory_leave_the_files_of_one(models, tmp_path, monkeypatch):
    pair = job.load_pair(*models, "cpu", "float32", None)
    monkeypatch.setattr(job, "load_pair", lambda *args: pair)  # which no two threads may do at once
    inputs = [tmp_path / f"{i}.jsonl" for i in range(3)]
    for path in inputs:
        path.write_text(json.dumps(GOOD))
    out = tmp_path / "out"
    jobs = [threading.Thread(target=score_chats, args=(path, *models, out)) for path in inputs]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert set(contents(out)) == OUTPUTS
    sources = {
        parquet.read_schema(out / name).metadata[b"chats"].decode()
        for name in ("tokens.parquet", "chats.parquet")
    }
    (source,) = sources
    assert f"{Path(source).name}:1" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", sorted(OUTPUTS))
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


@pytest.mark.parametrize(("owner", "name"), [(tempfile, "mkdtemp"), (Path, "replace")])
def test_an_error_of_the_directory_is_named(
    earlier, write_chats, score, monkeypatch, capsys, owner, name
):
    out, before = earlier

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, name, full)
    assert score(write_chats(OTHER))[0] == 2
    assert "out: cannot write" in capsys.readouterr().err
    assert contents(out) == before


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


def test_a_directory_without_permission_is_refused(models, write_chats, tmp_path, monkeypatch):
    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(output.tempfile, "mkdtemp", denied)
    with pytest.raises(ScoreError, match=r"out: .*Permission denied; choose a directory"):
        score_chats(write_chats(GOOD), *models, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


def test_a_directory_in_the_place_of_a_file_is_refused(models, write_chats, tmp_path, capsys):
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    assert run(models, write_chats(GOOD), tmp_path / "out") == 2
    assert "got a directory there" in capsys.readouterr().err


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


def test_a_terminal_that_knows_no_umlauts_is_told_the_path(
    models, write_chats, tmp_path, monkeypatch
):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert run(models, write_chats(GOOD), tmp_path / "\xfc") == 0
    sys.stdout.flush()
    assert rb"\xfc/report.html" in printed.getvalue()
