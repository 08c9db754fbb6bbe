"""What runs in an actor of RayLLMCollector, without Ray's processes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import ray_dialogs
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting, policy
from tensordict import TensorDict

from fusedrl import PolicyVersion, VanillaLocalWeightUpdater
from fusedrl.collectors.cluster.dialog_actor import DialogActor
from fusedrl.transport import deserialize

pytest.importorskip("ray")


def weights_of(version: float) -> TensorDict:
    return TensorDict.from_module(policy_of(Says(version))).data


def started(index: int = 0, of: int = 1, **options: Any) -> DialogActor:
    actor = DialogActor()
    given = {
        "env": Counting(),
        "policy": None if "policy_factory" in options else ray_dialogs.says(),
        "policy_factory": None,
        "dialog_turns_per_batch": 2,
        "track_policy_version": True,
    }
    actor.make(given | options, {"seed": 0}, index, of)
    return actor


def batch_of(actor: DialogActor) -> Any:
    return deserialize(actor.collect().batch)


def test_weights_come_with_their_version():
    actor = started()
    assert of(batch_of(actor)) == [0, 0]
    for version in (1, 2, 7):
        actor.publish(weights_of(version), version)
        assert of(batch_of(actor)) == [version] * 2


def test_weights_that_come_while_the_policy_runs_are_the_next_turns():
    actor = started(dialog_turns_per_batch=6)

    def publishing(*_):
        version = (actor._channel.version or 0) + 1
        actor.publish(weights_of(version), version)

    actor.policy.register_forward_hook(publishing)
    assert of(batch_of(actor)) == [0, 1, 2] * 2


def test_a_count_is_a_version_of_the_weights_there_are():
    actor = started()
    actor.renumber(1)
    assert batch_of(actor)["next", "policy_version"].tolist() == [[1], [1]]
    actor.publish(weights_of(2), 2)
    actor.renumber(3)
    batch = batch_of(actor)
    assert batch["action"].flatten().tolist() == [2, 2]
    assert batch["policy_version"].flatten().tolist() == [3, 3]


def test_a_count_while_an_older_version_is_in_use_is_of_the_newest_weights():
    actor = started(dialog_turns_per_batch=4)
    versions = iter([1])

    def publishing(*_):
        for version in versions:
            actor.publish(weights_of(version), version)
            actor.renumber(version + 1)

    actor.policy.register_forward_pre_hook(publishing)
    batch = batch_of(actor)
    assert batch["action"].squeeze(-1).tolist() == [[0, 1]] * 2
    assert batch["policy_version"].tolist() == [[0, 2]] * 2


def test_counts_and_the_end():
    actor = started(total_dialog_turns=4)
    got = [actor.collect() for _ in range(4)]
    assert [one.over for one in got] == [False, False, True, True]
    assert [one.frames for one in got] == [2, 4, 4, 4]
    assert [one.batch is None for one in got] == [False, False, True, True]


def test_it_ends_between_two_turns():
    actor = started(dialog_turns_per_batch=100)
    closing = threading.Thread(target=actor.shutdown)

    def close(*_: Any) -> None:
        closing.start()
        ray_dialogs.wait_for(lambda: actor._ends)

    actor.policy.register_forward_pre_hook(close)
    with pytest.raises(RuntimeError, match="got one that was shut down"):
        actor.collect()
    closing.join()
    assert actor._watch.turns == 2 and actor.closed


def test_a_failure_is_not_the_end():
    actor = started(env=ray_dialogs.Failing())
    actor.collect()
    actor.collect()
    with pytest.raises(LookupError, match="no third step"):
        actor.collect()
    with pytest.raises(RuntimeError, match="got one that was shut down"):
        actor.collect()


def test_what_a_batch_had_before_its_postprocessing():
    actor = started(postproc=ray_dialogs.only_seen)
    collected = actor.collect()
    assert "policy_version" not in deserialize(collected.batch)
    assert collected.oldest == 0 and collected.tokens is None
    assert started(track_policy_version=False).collect().oldest is None


def test_ids_differ_between_actors():
    ids = [
        batch_of(started(index, of=3))["collector", "traj_ids"].flatten().tolist()
        for index in range(3)
    ]
    assert ids == [[0, 3], [1, 4], [2, 5]]


def test_ids_go_on_behind_those_of_a_state():
    actor = started(1, of=3)
    batch_of(actor)
    state = actor.state_dict()
    ids = [batch_of(actor)["collector", "traj_ids"].unique().tolist() for _ in range(2)]
    actor.load_state_dict(state)
    fresh = batch_of(actor)["collector", "traj_ids"]
    assert ids == [[1, 4]] * 2 and fresh.min() > 4 and (fresh % 3 == 1).all()


def test_random_numbers_differ_between_actors_whatever_their_factory_seeds():
    def factory():
        torch.manual_seed(1)
        return ray_dialogs.says()

    drawn = []
    for seed in (5, 6):
        actor = DialogActor()
        arguments = {"policy": None, "policy_factory": factory, "env": Counting()}
        actor.make(arguments, {"seed": seed, "dialog_turns_per_batch": 2}, 0, 1)
        drawn.append(torch.rand(1).item())
    assert drawn[0] != drawn[1]


def test_an_updater_takes_the_place_of_the_channel():
    actor = started()
    actor.publish(weights_of(1), 1)
    of(batch_of(actor))
    actor.set_updater(VanillaLocalWeightUpdater(None, None))
    assert actor._channel is None and of(batch_of(actor)) == [1, 1]
    actor.update_as(5, weights_of(5), None)
    assert of(batch_of(actor)) == [5, 5]


def test_an_updater_from_the_start_with_uuids():
    tracker = PolicyVersion("uuid")
    updater = VanillaLocalWeightUpdater(None, None)
    actor = started(weight_updater=updater, track_policy_version=tracker)
    actor.update_as("a name", weights_of(5), None)
    assert actor._channel is None
    assert batch_of(actor)["next", "policy_version"] == [["a name"]] * 2


def test_a_policy_without_weights_has_no_channel():
    actor = started(policy=policy)
    assert actor._channel is None
    actor.renumber(4)
    assert batch_of(actor)["policy_version"].flatten().tolist() == [4, 4]
    with pytest.raises(TypeError, match="policy: expected a module"):
        actor.publish(weights_of(1), 1)


class Speaker:
    """A policy that is no module, and has one as its model."""

    def __init__(self, version: float) -> None:
        self.model = Says(version)

    def __call__(self, tensordict: Any) -> Any:
        return policy_of(self.model)(tensordict)


def test_weights_of_a_policy_that_is_no_module_are_those_of_its_model():
    actor = started(policy=Speaker(0))
    for version, weights in enumerate((Speaker(1), Speaker(2).model, weights_of(3)), 1):
        actor.publish(weights, version)
        assert of(batch_of(actor)) == [version] * 2
