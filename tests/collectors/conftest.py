"""What the tests of collectors share: the dialogs of ``tests/transforms``, and one thread."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from counting_dialogs import Counting
from counting_dialogs import policy as numbers_policy
from one_thread import one_thread
from transforms.conftest import (
    _torchrl_conventions,
    chat_env,
    generating_policy,
    policy,
    policy_model,
    reference,
    reference_model,
    tokenizer,
    wrap,
)

from fusedrl import LLMCollector

__all__ = [
    "_torchrl_conventions",
    "chat_env",
    "generating_policy",
    "one_thread",
    "policy",
    "policy_model",
    "reference",
    "reference_model",
    "tokenizer",
    "wrap",
]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked, which takes a tenth of the time that those take that import."""
    context = multiprocessing.get_context("fork")
    module = "fusedrl.collectors.process.async_collector"
    monkeypatch.setattr(f"{module}.process_context", lambda: context)


@pytest.fixture
def forked_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of torchrl's pools are forked; those that are spawned import for seconds."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr("torchrl.envs.async_envs.multiprocessing", context)


@pytest.fixture
def collect() -> Iterator[Callable[..., LLMCollector]]:
    """A collector of four turns a batch, eight in all; shut down after the test."""
    made = []

    def collect(env: Any = None, **options: Any) -> LLMCollector:
        given = {"policy": numbers_policy, "dialog_turns_per_batch": 4, "total_dialog_turns": 8}
        made.append(LLMCollector(Counting() if env is None else env, **(given | options)))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown()
