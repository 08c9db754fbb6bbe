"""LLMCollector.as_remote(): our collector as an actor of its own."""

from __future__ import annotations

import sys

import pytest
import ray_dialogs
from counting_dialogs import Counting
from ray_nodes import nodes

from fusedrl import LLMCollector

ray = pytest.importorskip("ray")


def test_our_collector_as_an_actor():
    """In a worker that Ray starts as it does for users: it imports by itself."""
    nodes.start()
    remote = LLMCollector.as_remote().options(runtime_env={"py_executable": sys.executable})
    actor = remote.remote(Counting(), policy=ray_dialogs.says(), dialog_turns_per_batch=2)
    batch = ray.get(actor.next.remote())
    assert batch.shape == (2, 1) and ray.get(actor.is_initialized.remote())
    ray.kill(actor)
