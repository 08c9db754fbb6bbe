"""The demo: a reward that its loop raises, the report of it, and an end without processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("pyarrow")

from fusedrl.examples.grpo import train
from shown import assert_prints, blocks, texts

from fusedrl.cli import demo as command
from fusedrl.cli import main
from fusedrl.demo import dialogs, make_reference
from fusedrl.demo.models import one_thread

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/start/first-score.md"


@pytest.mark.heavy
def test_demo_trains_and_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "make_reference", partial(make_reference, steps=2))
    monkeypatch.setattr(command, "train", partial(train, batches=3))
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    printed = capsys.readouterr().out
    assert "24 chats scored, 0 skipped" in printed
    assert_prints(texts(PAGE, "console"), printed, figures=False)
    report = (tmp_path / "demo-out/report.html").read_text()
    assert report.index("How the policy was trained") < report.index("Where the policy drifted")
    assert report.count("<polyline") == 2
    assert "publishing weights" in report

    # What the README does with what a demo has left behind.
    readme = ROOT / "README.md"
    [scoring] = [block for block in blocks(readme, "console") if "fusedrl score" in block]
    scoring = scoring.replace(".venv/bin/fusedrl", f"{sys.executable} -m fusedrl")
    done = subprocess.run(["bash", "-ec", scoring], capture_output=True, text=True)
    assert_prints(texts(readme, "console"), done.stdout, figures=False)


def test_a_folder_that_no_library_can_write_is_named(tmp_path, capsys):
    assert main(["demo", f"--out={tmp_path}/\udcff"]) == 2
    assert "demo: out: cannot write " in capsys.readouterr().err


def test_a_pipe_that_breaks_is_not_a_fault_of_the_folder(tmp_path, monkeypatch):
    def print_to_nobody(folder):
        raise BrokenPipeError

    monkeypatch.setattr(command, "make_reference", print_to_nobody)
    with pytest.raises(BrokenPipeError):
        main(["demo", f"--out={tmp_path}"])


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rewards_are_learned_and_shuffled_ones_are_not(tmp_path):
    make_reference(tmp_path / "reference")

    def shuffled(answers):
        return dialogs.digits(answers)[torch.randperm(len(answers))]

    def gained(seed, rewards):
        batches = train(tmp_path / "reference", tmp_path / "policy", seed=seed, rewards=rewards)
        reward = [batch["reward"] for batch in batches]
        return sum(reward[-6:]) / 6 - sum(reward[:6]) / 6

    with one_thread():
        learned = [gained(seed, dialogs.digits) for seed in range(3)]
        control = gained(0, shuffled)
    print(learned, control)
    assert min(learned) > 0.3
    assert control < 0.15


def processes_of(session: int) -> list[str]:
    """The command lines of what still runs in a session of the kernel."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found.append(stat.with_name("cmdline").read_bytes().decode())
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_an_interrupt_leaves_no_process(tmp_path):
    code = (
        "import functools, sys, fusedrl.cli.demo as demo, fusedrl.cli as cli;"
        "demo.make_reference = functools.partial(demo.make_reference, steps=2);"
        f"sys.exit(cli.main(['demo', '--out', {str(tmp_path)!r}]))"
    )
    program = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert program.stdout
    with program.stdout as lines:
        next(line for line in lines if line.startswith("version"))
        assert len(processes_of(program.pid)) > 1
        os.killpg(program.pid, signal.SIGINT)
        lines.read()
    assert program.wait() == 130
    until = time.monotonic() + 5  # helpers of multiprocessing end when their pipe has closed
    while processes_of(program.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert processes_of(program.pid) == []


@pytest.mark.parametrize("place", ["taken", "taken/below", "/proc/fusedrl"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, capsys, place):
    (tmp_path / "taken").write_text("mine")
    assert main(["demo", "--out", str(tmp_path / place)]) == 2
    assert f"demo: out: cannot write {tmp_path / place}: " in capsys.readouterr().err
