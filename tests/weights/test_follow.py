"""Collectors that follow a channel: what their frames are tagged with, and until when."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from channel_collector import Says
from counting_dialogs import Counting
from one_thread import one_thread
from sync_workers import Canary, canary_policy, weights_of
from tensordict.nn import TensorDictModule, TensorDictSequential
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from weights_workers import Ones

from fusedrl import ChannelWeightSyncScheme, LLMCollector

__all__ = ["one_thread"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def collect() -> Iterator[Callable[..., Any]]:
    """A collector of a kind whose policy follows a scheme, and the scheme."""
    made = []

    def collect(kind: type, **options: Any) -> tuple[Any, ChannelWeightSyncScheme]:
        scheme = ChannelWeightSyncScheme()
        given: dict[str, Any] = {"policy": canary_policy(), "track_policy_version": True}
        if kind is Collector:
            given |= {"frames_per_batch": 4, "total_frames": -1}
        else:
            given |= {"dialog_turns_per_batch": 4, "total_dialog_turns": -1}
        given["weight_sync_schemes"] = {"policy": scheme}
        collector = kind(Ones(), **(given | options))
        made.append((collector, scheme))
        return made[-1]

    yield collect
    for collector, scheme in made:
        collector.shutdown(raise_on_error=False)
        scheme.shutdown()


def tags(batch: Any) -> list[int]:
    tags = batch["next", "policy_version"].flatten().tolist()
    assert batch["policy_version"].flatten().tolist() == tags
    return tags


KINDS = [Collector, LLMCollector]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_the_trainers_own_have_a_number_of_their_own_after_a_shutdown(collect, kind):
    collector, scheme = collect(kind)
    scheme.send(weights_of(2.0))
    assert tags(collector.rollout()) == [2] * 4
    scheme.send(weights_of(3.0))  # which no turn has
    scheme.shutdown()
    for number in (4, 5):
        batch = collector.rollout()  # the root's entry is late in torchrl's collectors
        assert batch["next", "policy_version"].flatten().tolist() == [number] * 4
        assert batch["low"].flatten().tolist() == [1.0] * 4
        collector.increment_version()


def test_a_tag_that_torchrl_has_copied_is_that_of_the_weights(collect):
    """As it does for the transform that counts the frames of a trajectory."""
    collector, scheme = collect(Collector, max_frames_per_traj=3)
    iterator = iter(collector)
    for version in (1, 2, 3):
        assert tags(next(iterator)) == [version] * 4
        scheme.send(weights_of(version + 1.0))


def test_frames_of_random_actions_have_one_tag(collect):
    policy = TensorDictModule(Canary(), ["observation"], ["action", "low", "high"])
    collector, _ = collect(Collector, policy=policy, init_random_frames=8, reset_at_each_iter=True)
    iterator = iter(collector)
    for version in (1, 2, 3):
        batch = next(iterator)
        assert len(set(tags(batch))) == 1
        if version == 3:  # the first batch that the policy is called for
            assert tags(batch) == [3] * 4 == batch["low"].flatten().tolist()
        collector.update_policy_weights_(weights_of(version + 1.0))


def test_torchrls_collector_of_dialogs_is_refused():
    collector = TorchrlLLMCollector(Ones(), policy=canary_policy(), dialog_turns_per_batch=4)
    scheme = ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", context=collector)
    with pytest.raises(TypeError, match=r"collector: expected fusedrl\.LLMCollector"):
        scheme.connect()
    assert collector.rollout()["low"].flatten().tolist() == [1.0] * 4
    collector.shutdown()


def two_parts() -> TensorDictSequential:
    first = TensorDictModule(Says(1), ["seen"], ["action"])
    return TensorDictSequential(first, TensorDictModule(Says(1), ["seen"], ["other"]))


def test_two_channels_for_one_policy_are_refused_where_turns_have_versions():
    """As it is in a worker, where the policy is nobody else's."""
    schemes = {f"policy.module[{number}]": ChannelWeightSyncScheme() for number in (0, 1)}
    for (name, scheme), part in zip(schemes.items(), two_parts().module, strict=True):
        scheme.init_on_sender(model_id=name, model=part)
        scheme.connect()
    collector = LLMCollector(
        Counting(), policy=two_parts(), dialog_turns_per_batch=2, track_policy_version=True
    )
    first, second = (pickle.loads(pickle.dumps(scheme)) for scheme in schemes.values())
    for end, name in zip((first, second), schemes, strict=True):
        end.init_on_receiver(model_id=name, context=collector, worker_idx=0)
    first.connect(worker_idx=0)
    with pytest.raises(
        ValueError, match="weight_sync_schemes: expected one scheme for the policy, got"
    ):
        second.connect(worker_idx=0)
    assert tags(collector.rollout()) == [1] * 2
    collector.shutdown()
    for scheme in (first, second, *schemes.values()):
        scheme.shutdown()
