"""The memory of a channel is reserved when it is created."""

from __future__ import annotations

import resource
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
