"""Collectors in processes that are shut down after a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from async_workers import ones
from prepared import processes
from torchrl.testing.mocking_classes import CountingEnv

from fusedrl import AsyncCollector


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is no fork of this process either, and starts at once."""
    module = "fusedrl.collectors.process.async_collector"
    monkeypatch.setattr(f"{module}.process_context", lambda: processes)


@pytest.fixture
def make() -> Iterator[Callable[..., AsyncCollector]]:
    made = []

    def make(env: Any = CountingEnv, policy: Any = ones, **options: Any) -> AsyncCollector:
        made.append(AsyncCollector(env, policy, **({"frames_per_batch": 4} | options)))
        return made[-1]

    yield make
    for collector in made:
        collector.shutdown(timeout=1)
