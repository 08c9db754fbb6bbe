"""What a collector loads of a state, and that one which does not fit is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting_dialogs import Counting, Rounded
from tensordict.nn import TensorDictModule
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardScaling

from fusedrl import AsyncCollector, LLMCollector


def policy(width: int = 1) -> TensorDictModule:
    return TensorDictModule(Rounded(torch.nn.Linear(1, width)), ["seen"], ["action"])


def scaled() -> TransformedEnv:
    return TransformedEnv(Counting(), RewardScaling(loc=0.0, scale=1.0))


def longer(state: Any) -> Any:
    return {key: torch.ones(7) for key in state}


def test_a_part_of_a_state_is_taken_when_asked_for(collect):
    collector = collect(policy=policy())
    state = collector.state_dict()
    del state["policy_state_dict"], state["env_state_dict"]
    with pytest.raises(KeyError, match="env_state_dict"):
        collector.load_state_dict(state)
    collector.load_state_dict(state | {"frames": 4}, strict=False)
    assert collector.stats()["frames"] == 4


@pytest.mark.parametrize("part", ["env_state_dict", "policy_state_dict"])
def test_a_state_of_another_collector_is_an_error(collect, part):
    collector = collect(scaled(), policy=policy(), track_policy_version=True)
    collector.next()
    state = collector.state_dict()
    with pytest.raises((RuntimeError, ValueError)):
        collector.load_state_dict({**state, part: longer(state[part])})
    with pytest.raises((TypeError, ValueError)):
        collector.load_state_dict({**state, "frames": 12, "policy_version": "abc"})
    assert collector.state_dict()["frames"] == state["frames"]
    del state["traj_pool"]
    collector.load_state_dict({**state, "policy_version": 5})
    assert collector.policy_version == 5


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_a_worker_refuses_a_state_of_another_collector():
    options: dict[str, Any] = {"frames_per_batch": 4, "track_policy_version": True}
    with AsyncCollector(scaled, policy(), collector_class=LLMCollector, **options) as collector:
        state = collector.state_dict()
        state["worker0"]["env_state_dict"] = longer(state["worker0"]["env_state_dict"])
        with pytest.raises((RuntimeError, ValueError)):
            collector.load_state_dict(state)
        assert collector.stats()["frames"] == 0
