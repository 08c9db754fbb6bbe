"""Writing into memory that is the channel's ends the process, and says why."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import channel_workers as workers
import pytest

START = """
import ctypes, faulthandler, os, signal, sys, threading, torch
from fusedrl import WeightChannel
from fusedrl.channel.following import Follower

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))

channel = WeightChannel.create(model())
channel.publish(version=6)
channel.publish(version=7)
reader = channel.handle.open()
policy = model().requires_grad_(False)
"""
ALIAS = "reader.load_into(policy)\n"
WRITE = "policy[1].weight[1, 2] = 5\n"
OUTSIDE = "ctypes.memset(8, 1, 1)\n"
# Something of this process's own that is read-only.
ELSEWHERE = """
import mmap
file = open(os.memfd_create("other"), "w+b")
file.truncate(4096)
own = mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ)
address = torch.frombuffer(own, dtype=torch.uint8).data_ptr()
ctypes.memset(address, 1, 1)
"""


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


def told(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("fusedrl: ")]


def died(done: Done) -> bool:
    return done.returncode == -signal.SIGSEGV


def says(done: Done, name: str = "1.weight", version: int = 7) -> bool:
    """Whether one line, and no other, has the name, the version and the remedy."""
    lines = told(done.stderr)
    return (
        len(lines) == 1
        and f"a write to {name} of version {version} " in lines[0]
        and 'mode="copy"' in lines[0]
    )


@pytest.mark.parametrize(
    ("write", "name"),
    [
        ("policy[0].weight.zero_()", "0.weight"),
        ("policy[1].bias[1] = 1", "1.bias"),
        ("torch.nn.init.normal_(policy[1].weight)", "1.weight"),
    ],
)
def test_the_parameter_the_version_and_the_remedy_are_told(write, name):
    done = run(ALIAS, write)
    assert died(done) and says(done, name), done.stderr


def test_it_is_told_of_a_lease_and_of_a_follower_too():
    for code in (
        "lease = reader.lease(); lease.weights['1', 'weight'].add_(1)",
        "follower = Follower(reader, policy); follower.load(); " + WRITE,
    ):
        done = run(code)
        assert died(done) and says(done), done.stderr


def test_it_is_told_of_the_version_that_is_written_to_and_not_of_the_newest():
    done = run(ALIAS, "channel.publish(version=9)", WRITE)
    assert died(done) and says(done, version=7), done.stderr


def test_it_is_told_in_a_thread_and_in_a_forked_child():
    thread = "t = threading.Thread(target=lambda: policy[1].weight.zero_()); t.start(); t.join()"
    done = run(ALIAS, thread)
    assert died(done) and says(done), done.stderr
    fork = """
child = os.fork()
if child == 0:
    policy[1].weight.zero_()
sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""
    done = run(ALIAS, fork)
    assert done.returncode == signal.SIGSEGV and says(done), done.stderr


def test_it_is_told_where_views_outlive_the_reader_and_the_channel():
    keep = """
with reader.lease() as lease:
    kept = lease.weights["1", "weight"]
reader.close(); channel.close()
del reader, channel, lease
kept.zero_()
"""
    done = run(keep)
    assert died(done) and says(done), done.stderr


@pytest.mark.parametrize(
    "setup",
    ["faulthandler.enable()\n" + ALIAS, ALIAS + "faulthandler.enable()\n"],
    ids=["before", "after"],
)
@pytest.mark.parametrize("where", ["main", "thread"])
def test_faulthandler_shows_the_line_as_well(setup, where):
    write = "def write():\n    policy[1].weight.zero_()\n"
    call = (
        "write()" if where == "main" else "t = threading.Thread(target=write); t.start(); t.join()"
    )
    done = run(setup, write, call)
    assert died(done) and says(done), done.stderr
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "in write" in done.stderr


def test_other_faults_end_as_they_would_without_a_channel():
    """Signal, output and the number of handlers that ran are those of a process without ours."""
    for setup in ("", "faulthandler.enable()\n"):
        for fault in (OUTSIDE, ELSEWHERE, "os.kill(os.getpid(), signal.SIGSEGV)\n"):
            for code in (setup + ALIAS, ALIAS + setup):
                done = run(code, fault)
                assert died(done) and told(done.stderr) == [], (setup, fault, done.stderr)
                crashes = done.stderr.count("Fatal Python error: Segmentation fault")
                assert crashes == (1 if setup else 0), done.stderr


def test_a_signal_that_is_ignored_or_handled_in_python_goes_on_being_so():
    ignored = "signal.signal(signal.SIGSEGV, signal.SIG_IGN)\n"
    handled = "signal.signal(signal.SIGSEGV, lambda *_: print('handled', flush=True))\n"
    send = "os.kill(os.getpid(), signal.SIGSEGV)\nprint('lives')\n"
    for order in (lambda x: x + ALIAS, lambda x: ALIAS + x):
        done = run(order(ignored), send)
        assert (done.returncode, done.stdout, told(done.stderr)) == (0, "lives\n", [])
        done = run(order(handled), send)
        assert (done.returncode, done.stdout.split(), told(done.stderr)) == (
            0,
            ["handled", "lives"],
            [],
        )
    done = run(ignored, ALIAS, WRITE)  # what an instruction raises is never ignored
    assert died(done) and says(done), done.stderr


def test_a_handler_that_repairs_what_it_is_called_for_is_called_each_time(tmp_path):
    """As those of virtual machines: ours stays in front of it and stays out of its way."""
    source = tmp_path / "repair.c"
    source.write_text(r"""
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
static int repaired, on_stack;
static void repair(int number, siginfo_t* info, void* context) {
  mprotect((void*)((unsigned long)info->si_addr & ~4095ul), 4096, PROT_READ | PROT_WRITE);
  sigset_t blocked;
  sigprocmask(SIG_SETMASK, 0, &blocked);
  on_stack = sigismember(&blocked, SIGUSR1);
  ++repaired;
}
void install(void) {
  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = repair;
  action.sa_flags = SA_SIGINFO;
  sigaddset(&action.sa_mask, SIGUSR1);
  sigaction(SIGSEGV, &action, 0);
}
int faults(void) {
  for (int i = 0; i < 3; ++i) {
    char* page = mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    page[7] = 1;
  }
  return on_stack ? repaired : -1;
}
""")
    library = tmp_path / "repair.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    code = f"repair = ctypes.CDLL({str(library)!r}); repair.install()\n"
    done = run(code, ALIAS, "print(repair.faults())")
    assert (done.returncode, done.stdout, told(done.stderr)) == (0, "3\n", []), done.stderr


def test_nothing_is_installed_where_nothing_is_lent():
    code = """
def handler():
    # the address of the handler in the kernel's struct: 0 is the default
    action = (ctypes.c_ulong * 32)()
    ctypes.CDLL(None).sigaction(signal.SIGSEGV, None, action)
    return action[0]
before = handler()
reader.load_into(policy, mode="copy")
assert handler() == before == 0
reader.load_into(policy)
ours = handler()
assert ours != 0
reader.load_into(policy)
channel.handle.open().load_into(model())
assert handler() == ours
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_readers_that_come_and_go_while_threads_fault_elsewhere_are_no_trouble():
    code = """
faults = []
def come_and_go():
    for _ in range(200):
        with channel.handle.open() as other, other.lease() as lease:
            assert lease.weights["1", "weight"].shape == (2, 4)
threads = [threading.Thread(target=come_and_go) for _ in range(4)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    done = run(code, ALIAS, WRITE)
    assert died(done) and says(done), done.stderr
