"""What a collector loads of a state, and that it loads all of it or nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
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


def test_a_part_of_a_state_is_taken_when_asked_for(collect):
    collector = collect(policy=policy())
    state = collector.state_dict()
    del state["policy_state_dict"], state["env_state_dict"]
    with pytest.raises(KeyError, match="env_state_dict"):
        collector.load_state_dict(state)
    collector.load_state_dict(state | {"frames": 4}, strict=False)
    assert collector.stats()["frames"] == 4


def without(part: str) -> Callable[[Any], Any]:
    return lambda state: {key: value for key, value in state.items() if key != part}


def broken(part: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: {**state, part: change(state[part])}


def empty(state: Any) -> Any:
    return {}


def with_more(state: Any) -> Any:
    return {**state, "more": torch.ones(1)}


def longer(state: Any) -> Any:
    return {key: torch.ones(7) for key in state}


BROKEN = {
    "no count": (without("iter"), KeyError, "'iter'"),
    "no policy": (without("policy_state_dict"), KeyError, "'policy_state_dict'"),
    "an empty policy": (broken("policy_state_dict", empty), ValueError, "weight, missing"),
    "another policy": (broken("policy_state_dict", longer), ValueError, r"\(\[7\]\) for"),
    "more weights": (broken("policy_state_dict", with_more), ValueError, "more, unexpected"),
    "another environment": (broken("env_state_dict", longer), ValueError, "env_state_dict"),
    "no numbers of trajectories": (broken("traj_pool", empty), ValueError, "traj_id, missing"),
    "a name as version": (broken("policy_version", str), ValueError, "of another kind"),
}


@pytest.mark.parametrize(("change", "error", "told"), BROKEN.values(), ids=BROKEN)
def test_a_state_that_does_not_fit_changes_nothing(collect, change, error, told):
    collector = collect(scaled(), policy=policy(), track_policy_version=True)
    collector.next()
    state = collect(scaled(), policy=policy(), track_policy_version=True).state_dict()
    before = copy.deepcopy(collector.state_dict())
    with pytest.raises(error, match=told):
        collector.load_state_dict(change({**state, "frames": 2, "policy_version": 5}))
    torch.testing.assert_close(collector.state_dict(), before, rtol=0, atol=0)
    del state["traj_pool"]
    collector.load_state_dict({**state, "policy_version": 5})
    assert collector.policy_version == 5


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_a_worker_refuses_a_state_before_its_weights_are_published():
    options: dict[str, Any] = {"frames_per_batch": 4, "track_policy_version": True}
    with AsyncCollector(scaled, policy(), collector_class=LLMCollector, **options) as collector:
        state, version = collector.state_dict(), collector.policy_version
        state["worker0"] = broken("env_state_dict", longer)(state["worker0"])
        with pytest.raises(ValueError, match="env_state_dict"):
            collector.load_state_dict(state)
        assert collector.policy_version == version and collector.stats()["frames"] == 0
