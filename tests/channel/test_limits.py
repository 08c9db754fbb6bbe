"""A channel that does not fit is refused before its memory is taken."""

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

from fusedrl.channel import WeightChannel, limits

MIB = 2**20
# Three slots of 32 MiB, of a tensor that takes no memory.
WEIGHTS = {"a": torch.zeros(1).expand(8 * MIB)}
NEEDED = 96 * MIB


class Machine:
    """Files of a machine as the kernel would write them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable:   {1024 * MIB // 1024} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def available(self, nbytes: int) -> None:
        self.write("proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {nbytes // 1024} kB\n")

    def mount(self, cgroup: str, mountinfo: str) -> None:
        self.write("proc/self/cgroup", cgroup)
        self.write(
            "proc/self/mountinfo", "22 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw\n" + mountinfo
        )

    def group(self, path: str, **files: object) -> None:
        for name, value in files.items():
            self.write(f"sys/fs/cgroup/{path}/memory.{name}", f"{value}\n")


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROOT", tmp_path)
    return Machine(tmp_path)


def opened_files() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def refused(by: str, free: int, **options: object) -> None:
    """Creating is refused by that limit, with all that the user has to know."""
    opened = opened_files()
    with pytest.raises(RuntimeError) as error:
        WeightChannel.create(WEIGHTS, **options)
    message = str(error.value)
    assert f"expected room for {NEEDED} bytes" in message, message
    assert f"got {free} bytes" in message and by in message, message
    assert "fewer slots than 3" in message and "dtype=torch.bfloat16" in message, message
    assert opened_files() == opened


def test_the_machine_has_less_memory(machine):
    machine.available(NEEDED - 4096)
    refused("MemAvailable", NEEDED - 4096)
    machine.available(NEEDED + MIB)
    with WeightChannel.create(WEIGHTS):
        pass
    machine.available(NEEDED // 2 + MIB)
    with WeightChannel.create(WEIGHTS, dtype=torch.bfloat16):
        pass


@pytest.mark.parametrize("limited", ["", "job.slice", "job.slice/run"])
@pytest.mark.parametrize("name", ["max", "high"])
def test_a_control_group_or_one_above_it_has_less(machine, limited, name):
    machine.mount("0::/job.slice/run\n", V2)
    for path in ("", "job.slice", "job.slice/run"):
        machine.group(path, max="max", high="max", current=900 * MIB, stat="anon 5")
    machine.group(limited, **{name: 900 * MIB + NEEDED - 1})
    refused(f"{limited}/memory.{name}".lstrip("/"), NEEDED - 1)
    machine.group(limited, **{name: 900 * MIB + NEEDED})
    with WeightChannel.create(WEIGHTS):
        pass


def test_page_cache_counts_as_free_and_shared_memory_does_not(machine):
    machine.mount("0::/\n", V2)
    cache = f"anon 5\nfile {90 * MIB}\nshmem {50 * MIB}\ninactive_file {30 * MIB}\n"
    machine.group("", max=100 * MIB, current=100 * MIB, stat=cache + f"active_file {10 * MIB}")
    refused("memory.max", 40 * MIB)


def test_a_group_that_is_over_its_limit_has_nothing_free(machine):
    machine.mount("0::/\n", V2)
    machine.group("", max=100 * MIB, current=120 * MIB, stat="anon 5")
    refused("memory.max", 0)


@pytest.mark.parametrize(
    ("group", "top"), [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../outside", "/")]
)
def test_a_container_sees_its_own_group_as_the_root(machine, group, top):
    machine.mount(f"0::{group}\n", V2.replace("0:26 /", f"0:26 {top}"))
    machine.group("", max=10 * MIB, current=0, stat="")
    refused("memory.max", 10 * MIB)


def test_what_cannot_be_read_limits_nothing(machine):
    (machine.root / "proc/meminfo").unlink()
    with WeightChannel.create(WEIGHTS):
        pass
    machine.mount("0::/\n", V2)
    machine.group("", max="max", current="?", high="", stat="\0 x y\ninactive_file")
    with WeightChannel.create(WEIGHTS):
        pass


def test_this_machine_has_room_by_its_own_files():
    found = list(limits.rooms())
    assert any("MemAvailable" in room.limit for room in found)
    assert all(room.free > 0 for room in found)


def test_what_the_kernel_itself_refuses_says_the_same():
    """A limit that is not read before, or came in between."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10 * MIB, before[1]))
    try:
        with pytest.raises(RuntimeError, match=f"room for {NEEDED} bytes.*fewer slots than 3"):
            WeightChannel.create(WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
