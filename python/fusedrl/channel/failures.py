"""Errors that say why the kernel refused what a channel needs, and what helps."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

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
    told = _of_this_process(error)
    if told is None and error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        told = (
            f"weights: expected room for {nbytes} bytes of shared memory, got '{error.strerror}'; "
            f"{remedy}"
        )
    return RuntimeError(
        told
        or f"channel: expected shared memory, got '{error.strerror}'; let this process call "
        "memfd_create and mmap, which a security profile may forbid"
    )


def no_reader(error: OSError, pid: int) -> RuntimeError:
    """The error to raise where the channel of the publisher ``pid`` cannot be opened."""
    told = _of_this_process(error)
    if told is not None:
        return RuntimeError(told)
    expected, got, remedy = f"the channel of pid {pid}", f"'{error.strerror}'", _NOT_SEEN
    if error.errno in (errno.EACCES, errno.EPERM):
        expected = f"a publisher of this user (uid {os.geteuid()}) that may be looked into"
        got = f"no access to /proc/{pid}/fd"
        remedy = (
            "run both as one user and without a security profile between them, or pass the channel "
            "with WeightChannel.send_to and open(socket)"
        )
    elif error.errno == errno.ENOENT and not Path("/proc/self").exists():
        expected, got = "/proc", "none in this process"
        remedy = "mount it, or pass the channel with WeightChannel.send_to and open(socket)"
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
