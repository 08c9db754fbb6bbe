"""Writing into memory that is the channel's ends the process, and shows the line."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import NamedTuple

import channel_workers as workers
import pytest

pytestmark = pytest.mark.heavy

START = """
import ctypes, faulthandler, os, signal, sys, threading, torch
from fusedrl import WeightChannel

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

channel = WeightChannel.create(model())
channel.publish(version=6)
channel.publish(version=7)
reader = channel.handle.open()
policy = model().requires_grad_(False)
"""
ALIAS = "reader.load_into(policy)\n"
WRITE = "def write():\n    {}\n"


class Done(NamedTuple):
    """How a process ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*code: str) -> Done:
    """Run code in a process of its own, forked from one that has imported everything."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        files = [Path(f"/proc/{os.getpid()}/fd/{file.fileno()}") for file in (out, err)]
        with workers.process(workers.run_code, START + "\n".join(code), *files) as (child, _):
            child.join(120)
            assert child.exitcode is not None, "it hangs"
        out.seek(0)
        err.seek(0)
        return Done(child.exitcode, out.read(), err.read())


def says(done: Done) -> bool:
    """Whether it ended by the write, and stderr shows once which line that was."""
    crashes = done.stderr.count("Fatal Python error: Segmentation fault")
    return done.returncode == -signal.SIGSEGV and crashes == 1 and "in write" in done.stderr


@pytest.mark.parametrize(
    "code",
    [
        ALIAS + WRITE.format("policy[0].weight.zero_()"),
        "lease = reader.lease()\n" + WRITE.format("lease.weights['1', 'weight'].add_(1)"),
        "reader.follow(policy).load()\n" + WRITE.format("policy[1].weight.zero_()"),
        "faulthandler.enable()\n" + ALIAS + WRITE.format("policy[1].weight.zero_()"),
    ],
    ids=["method", "lease", "follower", "enabled before"],
)
def test_the_line_that_writes_is_shown(code):
    done = run(code, "write()")
    assert says(done), done.stderr


def test_it_is_shown_in_a_thread_and_in_a_forked_child():
    write = ALIAS + WRITE.format("policy[1].weight.zero_()")
    done = run(write, "t = threading.Thread(target=write); t.start(); t.join()")
    assert says(done), done.stderr
    done = run(write, "if os.fork() == 0:\n    write()\nsys.exit(os.WTERMSIG(os.wait()[1]))")
    assert done.returncode == signal.SIGSEGV and "in write" in done.stderr, done.stderr
