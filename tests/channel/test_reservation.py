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


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("RLIMIT_FSIZE", "File too large"), ("RLIMIT_AS", "Cannot allocate memory")],
)
def test_what_the_kernel_refuses_is_said_with_the_size_that_was_wanted(limit, reason):
    kind, opened = getattr(resource, limit), opened_files()
    before, pages = resource.getrlimit(kind), int(Path("/proc/self/statm").read_text().split()[0])
    taken = pages * resource.getpagesize() if limit == "RLIMIT_AS" else 0
    resource.setrlimit(kind, (taken + 64 * MIB, before[1]))
    wanted = (
        rf"3 slots of .*\({NEEDED}\) on cpu, got.*{reason}.*fewer slots \(at least 2\).*bfloat16"
    )
    try:
        with pytest.raises(RuntimeError, match=wanted):
            WeightChannel.create(WEIGHTS)
    finally:
        resource.setrlimit(kind, before)
    assert opened_files() == opened
