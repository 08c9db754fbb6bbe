"""RayLLMCollectors of tests, and weights that are their version."""

from __future__ import annotations

import os
from typing import Any

import ray
import ray_dialogs
from channel_collector import Says, policy_of
from counting_dialogs import Counting
from ray_nodes import NODES
from tensordict import TensorDict

from fusedrl import RayLLMCollector

ON_NODES = [{"num_cpus": 0, "resources": {node: 0.1}} for node in NODES]


def make(env: Any = Counting, **options: Any) -> RayLLMCollector:
    given = {
        "policy_factory": None if "policy" in options else ray_dialogs.says,
        "dialog_turns_per_batch": 4,
        "track_policy_version": True,
        "num_cpus": 0,
    }
    return RayLLMCollector(env, **(given | options))


def weights_of(version: float) -> TensorDict:
    return TensorDict.from_module(policy_of(Says(version))).data


def update(collector: RayLLMCollector) -> int:
    """Weights that are their version."""
    collector.update_policy_weights_(weights_of(collector.policy_version + 1))
    return collector.policy_version


def pids(collector: RayLLMCollector) -> list[int]:
    where = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in collector.actors]
    return ray.get(where)
