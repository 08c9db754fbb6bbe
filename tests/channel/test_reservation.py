"""The memory of a channel is reserved when it is created."""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusedrl.channel import WeightChannel

MIB = 2**20
# Three slots of 32 MiB, of a tensor that takes no memory.
WEIGHTS = {"a": torch.zeros(1).expand(8 * MIB)}
NEEDED = 96 * MIB


def opened_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_what_the_kernel_refuses_is_said_with_the_size_that_was_wanted():
    opened, before = opened_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, before[1]))
    wanted = rf"{NEEDED} bytes of shared memory, got.*File too large.*fewer slots than 3.*bfloat16"
    try:
        with pytest.raises(RuntimeError, match=wanted):
            WeightChannel.create(WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert opened_files() == opened


# A kernel that lets signals interrupt a reservation, as many do, and gives back what it had.
INTERRUPTING = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
int posix_fallocate(int fd, off_t offset, off_t bytes) {
  const char* longest = getenv("LONGEST");
  if (bytes <= atol(longest)) {
    typedef int (*call)(int, off_t, off_t);
    return ((call)dlsym(RTLD_NEXT, "posix_fallocate"))(fd, offset, bytes);
  }
  raise(SIGUSR1);
  return EINTR;
}
"""
CREATE = """
import os, signal, torch
from fusedrl import WeightChannel

seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
os.environ["LONGEST"] = str(2**20)
with WeightChannel.create({"a": torch.zeros(2**20)}) as channel:
    assert seen and os.stat(f"/proc/self/fd/{channel.handle.fd}").st_blocks * 512 > 3 * 2**22
    channel.publish()
signal.signal(signal.SIGUSR1, signal.default_int_handler)
os.environ["LONGEST"] = "0"  # nothing gets through: only the handler ends it
before = len(os.listdir("/proc/self/fd"))
try:
    WeightChannel.create({"a": torch.zeros(2**20)})
except KeyboardInterrupt:
    assert len(os.listdir("/proc/self/fd")) == before
    print("interrupted")
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_signals_interrupt_a_reservation_and_do_not_fail_it(tmp_path):
    source, library = tmp_path / "interrupting.c", tmp_path / "interrupting.so"
    source.write_text(INTERRUPTING)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CREATE],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_a_handler_that_raises_ends_the_reservation():
    """As Ctrl-C does; nothing stays open."""
    opened = opened_files()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def create_until_interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.002)
        while True:
            WeightChannel.create(WEIGHTS).close()

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            create_until_interrupted()
    finally:
        signal.signal(signal.SIGALRM, before)
    gc.collect()
    assert opened_files() == opened
