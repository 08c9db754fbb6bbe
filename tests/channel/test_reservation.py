"""The memory of a channel is reserved when it is created."""

from __future__ import annotations

import gc
import resource
import signal
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
