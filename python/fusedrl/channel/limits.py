"""How much memory a channel may take, what the kernel refuses and why, and the reservation itself.

Where shared memory that was promised runs out, the kernel kills a process, and not necessarily this
one. So the size of a channel is compared with what is left before memory is reserved.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import torch

from fusedrl import _host
from fusedrl.channel.memory import Manifest, Memory

# Where /proc and /sys are.
ROOT = Path("/")
# Where control groups (version 2) are. Of what they use, the kernel gives up caches first.
_GROUPS = "sys/fs/cgroup"
_CACHES = ("inactive_file", "active_file", "slab_reclaimable")


class Room(NamedTuple):
    """The bytes that one limit leaves."""

    free: int
    limit: str


def refuse_beyond(nbytes: int, remedy: str) -> None:
    """Raise ``RuntimeError`` where any limit leaves less than ``nbytes`` of shared memory."""
    least = min(rooms(), default=None)
    if least is not None and least.free < nbytes:
        raise RuntimeError(
            f"weights: expected room for {_in_gib(nbytes)} of shared memory, got "
            f"{_in_gib(least.free)} free by {least.limit}; {remedy}"
        )


def rooms() -> Iterator[Room]:
    """What every limit that this process can read leaves; swap does not count, as it is slow."""
    available = _numbers(ROOT / "proc/meminfo").get("MemAvailable:")
    if available is not None:
        yield Room(available * 1024, "this machine's memory (MemAvailable in /proc/meminfo)")
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _rooms_in_groups(path)


def _rooms_in_groups(path: str) -> Iterator[Room]:
    """What the limits of a control group, and of those above it, leave."""
    # A container that sees the machine's paths has no such folder, and its own at the top.
    group = PurePosixPath("" if ".." in path else path.lstrip("/"))
    for folder in (group, *group.parents):
        where = ROOT / _GROUPS / folder
        used, statistics = _text(where / "memory.current").strip(), _numbers(where / "memory.stat")
        cache = sum(statistics.get(name, 0) for name in _CACHES)
        for name in ("memory.max", "memory.high"):
            limit = _text(where / name).strip()
            if limit.isdecimal() and used.isdecimal():
                free = int(limit) - int(used) + min(cache, int(used))
                yield Room(max(free, 0), f"the control group's {where / name}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):  # missing or not readable, so it gives no limit
        return ""


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in a file that has a name and a number on each line."""
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _in_gib(nbytes: int) -> str:
    return f"{nbytes} bytes ({nbytes / 2**30:.2f} GiB)"


_NOT_SEEN = (
    "take a new handle from a publisher that runs; where it runs and sees other pids than this "
    "process (containers on one machine), use WeightChannel.send_to and open(socket)"
)


def no_channel(error: OSError, nbytes: int, remedy: str) -> RuntimeError:
    """The error to raise where the memory of a channel cannot be reserved.

    Args:
        error: the error of the system call.
        nbytes: how many bytes were asked for.
        remedy: what helps where there is too little memory.
    """
    message = _of_this_process(error)
    if message is None and error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        message = (
            f"weights: expected room for {nbytes} bytes of shared memory, got '{error.strerror}'; "
            f"{remedy}"
        )
    return RuntimeError(
        message
        or f"channel: expected shared memory, got '{error.strerror}'; let this process call "
        "memfd_create and mmap, which a security profile may forbid"
    )


def no_reader(error: OSError, pid: int) -> RuntimeError:
    """The error to raise where the channel of the publisher ``pid`` cannot be opened."""
    message = _of_this_process(error)
    if message is not None:
        return RuntimeError(message)
    expected, got, remedy = f"the channel of pid {pid}", f"'{error.strerror}'", _NOT_SEEN
    if error.errno in (errno.EACCES, errno.EPERM):
        expected = f"a publisher of this user (uid {os.geteuid()}) that may be looked into"
        got = f"no access to /proc/{pid}/fd"
        remedy = (
            "run both as one user and without a security profile between them, or pass the channel "
            "with WeightChannel.send_to and open(socket)"
        )
    elif error.errno == errno.ENOENT and not Path(f"/proc/{pid}").exists():
        expected = f"a running publisher with pid {pid}, seen by this process"
        got = "no such process: it has ended, or this process sees other pids"
    elif error.errno == errno.ENOENT:
        expected = f"a running publisher with pid {pid}, with its channel open"
        got = "a process of that pid without this channel: it was closed, or is another process's"
    elif error.errno == errno.ENOMEM:
        expected, got = "room to map the channel", f"{error.strerror}"
        remedy = "raise this process's address space (ulimit -v) or the machine's vm.max_map_count"
    return RuntimeError(f"handle: expected {expected}, got {got}; {remedy}")


def no_descriptor() -> str:
    """The message for a process that has reached its limit of open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"open files: expected fewer than this process's {limit} (ulimit -n), got all in use; "
        "close some, or raise the limit"
    )


def _of_this_process(error: OSError) -> str | None:
    if error.errno == errno.EMFILE:
        return no_descriptor()
    if error.errno == errno.ENFILE:
        return (
            "open files: expected fewer than the machine takes (fs.file-max), got all in use; end "
            "what has them open, or raise it with sysctl"
        )
    return None


def reserve(
    manifest: Manifest, where: torch.device, slots: int, max_readers: int, session: str
) -> tuple[Memory, _host.Publisher]:
    """The memory of a new channel's slots, and the publisher's end of it.

    Args:
        manifest: the description, as of slots in host memory.
        where: the device of the slots.
        slots: number of slots.
        max_readers: largest number of readers at a time.
        session: a name that no other channel has.

    Raises:
        ValueError: a device that is neither the CPU nor a CUDA device.
        RuntimeError: this machine, a control group or a limit of the process leaves too little.
    """

    size, memory = manifest.layout.nbytes, None
    if where.type == "cuda":
        from fusedrl.channel.cuda import CudaMemory

        memory = CudaMemory.create(where, slots, size)
        size, manifest = 0, manifest._replace(memory=memory.manifest())
    elif where.type != "cpu":
        raise ValueError(
            f"device: expected cpu or cuda, got {where}; device='cpu' serves any machine"
        )
    remedy = (
        f"create the channel with fewer slots than {slots}, or in half the width "
        "(dtype=torch.bfloat16)"
    )
    refuse_beyond(slots * size, remedy)
    try:
        end = _host.Publisher(slots, size, max_readers, session, manifest.to_bytes())
    except OSError as error:
        raise no_channel(error, slots * size, remedy) from error
    return memory or Memory(end, slots, size), end
