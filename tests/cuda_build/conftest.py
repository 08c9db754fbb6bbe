"""Tests on a CUDA build of torch without a GPU, which `make test-cuda-build` runs.

The libraries under torch are those that ``fake_libraries.py`` makes: a launch computes nothing, so
that only what copies make has a meaning. Without them no test here is collected; with them none is
skipped.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

collect_ignore_glob = [] if "FAKE_CUDA" in os.environ else ["test_*.py"]


class Launch(NamedTuple):
    """A kernel that was launched; ``runs`` says whether an H100 would run that many threads."""

    kernel: str
    blocks: tuple[int, ...]
    threads: tuple[int, ...]
    shared_memory: int
    runs: bool


class Launches:
    """The kernels of fusedrl that were launched since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> list[Launch]:
        """Those since the last call."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        new, self._read = lines[self._read :], len(lines)
        found = []
        for line in new:
            blocks, threads, shared_memory, verdict, kernel = line.split(" ", 4)
            if "fusedrl::" in kernel:
                sizes = (tuple(map(int, text.split(","))) for text in (blocks, threads))
                found.append(Launch(kernel, *sizes, int(shared_memory), verdict == "runs"))
        return found


@pytest.fixture
def launches(tmp_path, monkeypatch):
    """What is launched during a test."""
    path = tmp_path / "launches"
    monkeypatch.setenv("FAKE_CUDA_LAUNCHES", str(path))
    return Launches(path)
