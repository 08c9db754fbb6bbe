"""What a collector loads of a state, and that one which does not fit is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from async_workers import ones
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting, Rounded
from sync_collecting import collecting, forked, versions
from sync_workers import canary_policy, weights_of
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import RewardScaling
from torchrl.testing.mocking_classes import CountingEnv
from weights_workers import Ones

from fusedrl import AsyncCollector, ChannelWeightSyncScheme, LLMCollector

__all__ = ["forked"]


def policy(width: int = 1) -> TensorDictModule:
    return TensorDictModule(Rounded(torch.nn.Linear(1, width)), ["seen"], ["action"])


def scaled() -> TransformedEnv:
    return TransformedEnv(Counting(), RewardScaling(loc=0.0, scale=1.0))


def said(batch: Any) -> list[float]:
    """The version of a batch's frames, and the least and the greatest weight that they saw."""
    parts = (batch["next", "policy_version"], batch["low"], batch["high"])
    return [float(value) for part in parts for value in part.unique()]


def longer(state: Any) -> Any:
    return {key: torch.ones(7) for key in state}


def test_a_part_of_a_state_is_taken_when_asked_for(collect):
    collector = collect(policy=policy())
    state = collector.state_dict()
    del state["policy_state_dict"], state["env_state_dict"]
    with pytest.raises(KeyError, match="policy_state_dict"):
        collector.load_state_dict(state)
    collector.load_state_dict(state | {"frames": 4}, strict=False)
    assert collector.stats()["frames"] == 4


@pytest.mark.parametrize("part", ["env_state_dict", "policy_state_dict"])
def test_a_state_of_another_collector_is_an_error(collect, part):
    collector = collect(scaled(), policy=policy(), track_policy_version=True)
    collector.next()
    state = collector.state_dict()
    before = copy.deepcopy(state["policy_state_dict"])
    with pytest.raises((RuntimeError, ValueError)):
        collector.load_state_dict({**state, part: longer(state[part])})
    trained = copy.deepcopy(state)
    for value in trained["policy_state_dict"].values():
        value.add_(1)
    wrong = {"frames": "x", "iter": "x"}, {"policy_version": "abc"}, {"policy_version": 2**60}
    for entries in wrong:  # the last one is the last that is loaded
        with pytest.raises((TypeError, ValueError)):
            collector.load_state_dict({**trained, "frames": 12, **entries})
    now = collector.state_dict()
    assert now["frames"] == state["frames"]
    assert all(torch.equal(now["policy_state_dict"][n], x) for n, x in before.items())
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
        state = collector.state_dict()
        for name, wrong in (("frames", "x"), ("iter", None), ("policy_version", "x")):
            with pytest.raises(TypeError, match=f"{name}: expected"):
                collector.load_state_dict({**state, name: wrong})
        with pytest.raises(KeyError, match="expected 'frames' in it, got none; load what"):
            collector.load_state_dict({})
        assert collector.stats()["frames"] == 0 and collector.policy_version == 1


def test_dialogs_go_on_with_the_weights_and_the_version_of_a_state(collect):
    def begin() -> tuple[LLMCollector, Any]:
        trained = policy_of(Says())
        schemes = {"policy": ChannelWeightSyncScheme()}
        options = {"policy": trained, "weight_sync_schemes": schemes, "total_dialog_turns": -1}
        return collect(track_policy_version=True, **options), trained

    first, trained = begin()
    for version in range(2, 59):
        first.update_policy_weights_(policy_of(Says(version)))
    assert of(first.next()) == [58] * 4
    trained.load_state_dict(policy_of(Says(60)).state_dict())  # is not published yet
    state = first.state_dict()
    second, resumed = begin()
    with pytest.raises(KeyError, match=r"module\.value"):
        second.load_state_dict({**state, "policy_state_dict": {"other": torch.ones(1)}})
    assert second.policy_version == 1
    second.load_state_dict(state)
    assert of(second.next()) == [58] * 4 and second.stats()["frames"] == 8
    assert resumed.module.value.item() == 58
    second.load_state_dict(state)
    assert second.policy_version == 59  # a number is published once


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("make", [Collector, MultiSyncCollector])
def test_frames_go_on_with_the_weights_of_a_state_once_they_are_published(make, caplog):
    trained = canary_policy()
    with collecting(make, ChannelWeightSyncScheme(), trained) as (collector, iterator):
        trained.load_state_dict(canary_policy(9.0).state_dict())  # is not published yet
        for version in (2.0, 3.0, 4.0, 5.0):
            collector.update_policy_weights_(weights_of(version))
        next(iterator)
        state = copy.deepcopy(collector.state_dict())
    with collecting(make, ChannelWeightSyncScheme(), canary_policy()) as (collector, iterator):
        assert versions(next(iterator)) == {1}
        collector.load_state_dict(state)
        assert said(next(iterator)) == [1, 1.0, 1.0]
        if make is Collector:
            assert "got those of version 5; publish the weights of the next batch" in caplog.text
            collector.update_policy_weights_()
        else:
            collector.update_policy_weights_(state["worker0"]["policy_state_dict"])
        assert said(next(iterator)) == [2, *[9.0 if make is Collector else 5.0] * 2]
        assert collector.policy_version == 2


def test_a_part_of_the_weights_and_an_unknown_version_are_taken_when_asked_for(collect):
    def collector(value: float) -> LLMCollector:
        schemes = {"policy": ChannelWeightSyncScheme()}
        options = {"track_policy_version": True, "total_dialog_turns": -1}
        return collect(Ones(), policy=canary_policy(value), weight_sync_schemes=schemes, **options)

    def resumed(change: Callable[[dict[str, Any]], Any]) -> list[float]:
        state, other = copy.deepcopy(saved) | {"policy_version": 7}, collector(1.0)
        change(state)
        other.load_state_dict(state, strict=False)
        return said(other.next())

    saved = collector(3.0).state_dict()
    assert resumed(lambda state: state["policy_state_dict"].update(old=torch.ones(1))) == [7, 3, 3]
    assert resumed(lambda state: state["policy_state_dict"].pop("module.saved")) == [7, 1, 3]
    assert resumed(lambda state: state.pop("policy_version")) == [2, 3, 3]
    assert resumed(lambda state: state.pop("policy_state_dict")) == [8, 1, 1]


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_versions_of_a_policy_without_weights_tag_its_frames():
    """torchrl's collector copies the tracker where it cuts trajectories, and tags all with 0."""
    options: dict[str, Any] = {"frames_per_batch": 4, "max_frames_per_traj": 3, "prefetch": 0}
    with AsyncCollector(CountingEnv, ones, track_policy_version=True, **options) as collector:
        collector.next()
        collector.increment_version()
        assert collector.next()["next", "policy_version"].unique().tolist() == [1]
        state = collector.state_dict()
        state["worker0"]["policy_version"] = state["policy_version"] = 7
        collector.load_state_dict(state)
        assert collector.next()["next", "policy_version"].unique().tolist() == [7]
