"""RayLLMCollector with an actor on each of two nodes: one version, shares of a batch, state."""

from __future__ import annotations

import re
import threading
from itertools import islice

import pytest
import ray_dialogs
import torch
from channel_collector import Says, of, policy_of
from ray_collectors import update, weights_of
from ray_nodes import NODES
from tensordict import TensorDict
from torchrl.collectors.llm import RayLLMCollector as TorchrlRayLLMCollector

from fusedrl import PolicyVersion, RayRemoteWeightUpdater

ray = pytest.importorskip("ray")


class TestTwoNodes:
    def test_there_is_an_actor_on_each(self, pair, cluster):
        nodes = {handle: node for node in ray.nodes() for handle in node["Resources"]}
        where = [
            ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for actor in pair.actors
        ]
        assert where == [nodes[node]["NodeID"] for node in NODES]

    def test_an_update_reaches_both_under_one_version(self, pair):
        for _ in range(3):
            version = update(pair)
            assert of(pair.next()) == [version] * 4

    def test_a_batch_has_a_share_of_each(self, pair):
        batch = pair.next()
        assert batch.shape == (4, 1) and pair.dialog_turns_per_batch == 4
        ids = batch["collector", "traj_ids"].flatten()
        assert len(set(ids.tolist())) == 4 and (ids % 2).tolist() == [0, 0, 1, 1]

    def test_updates_of_two_threads_reach_both_in_one_order(self, pair):
        before, failed = pair.policy_version, []
        start = threading.Barrier(2)

        def updating() -> None:
            start.wait()
            try:
                for _ in range(10):
                    pair.update_policy_weights_(weights_of(1))
                    pair.increment_version()
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=updating) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed and pair.policy_version == before + 40
        version = update(pair)
        assert of(pair.next()) == [version] * 4

    @pytest.mark.parametrize(
        "form", [lambda m: m, lambda m: m.state_dict(), lambda m: TensorDict.from_module(m).data]
    )
    def test_weights_are_a_module_a_state_dict_or_a_tensordict(self, pair, form):
        version = pair.policy_version + 1
        trained = policy_of(Says(version))
        pair.update_policy_weights_(form(trained))
        assert of(pair.next()) == [version] * 4

    @pytest.mark.parametrize("name", ["weights", "policy", "policy_weights", "policy_or_weights"])
    def test_the_names_that_weights_may_have(self, pair, name):
        version = pair.policy_version + 1
        pair.update_policy_weights_(**{name: weights_of(version)}, worker_ids=[0, 1])
        assert of(pair.next()) == [version] * 4

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"weights": TensorDict(other=torch.ones(1))}, "other"),
            ({"weights": torch.nn.Linear(2, 2)}, "weight"),
            ({"weights": 3}, "weights: expected a module"),
            ({}, "policy_or_weights: expected weights, got none"),
            ({"weights": weights_of(1), "policy": policy_of(Says())}, "in one argument"),
            ({"weights": weights_of(1), "worker_ids": 0}, r"worker_ids: expected None or all"),
            ({"weights": weights_of(1), "model_id": "value"}, "no other model_id"),
            ({"weights_dict": {"value": weights_of(1)}}, "no other model_id"),
        ],
    )
    def test_what_is_refused_changes_nothing(self, pair, options, told):
        version = pair.policy_version
        with pytest.raises((ValueError, TypeError), match=told):
            pair.update_policy_weights_(**options)
        assert pair.policy_version == version
        assert of(pair.next()) == [version] * 4

    def test_a_count_is_one_everywhere(self, pair):
        version = pair.policy_version
        pair.increment_version()
        assert pair.policy_version == pair.get_policy_version() == version + 1
        batch = pair.next()
        assert batch["action"].flatten().tolist() == [version] * 4
        assert batch["next", "policy_version"].flatten().tolist() == [version + 1] * 4

    def test_the_updater_for_actors(self, pair):
        pair.weight_updater = None  # as it is: the channel stays
        updater = RayRemoteWeightUpdater(weights_of(0))
        pair.weight_updater = updater
        try:
            assert pair.weight_updater is updater and updater.all_worker_ids() == [0, 1]
            version = pair.policy_version
            pair.update_policy_weights_(weights_of(version + 1))
            assert of(pair.next()) == [version + 1] * 4
            updater.update_weights(weights_of(version + 2), worker_ids=[1])
            assert of(pair.next()) == [version + 1] * 2 + [version + 2] * 2
            updater(weights_of(version + 3))
            assert pair.policy_version == version + 3
            assert of(pair.next()) == [version + 3] * 4
        finally:
            pair.weight_updater = None
        assert update(pair) == version + 4 and of(pair.next()) == [version + 4] * 4

    def test_state_counts_and_time(self, pair):
        pair.next()
        state, stats = pair.state_dict(), pair.stats()
        assert set(state) == {"worker0", "worker1", "frames", "iter", "policy_version"}
        assert stats["frames"] == state["frames"] == sum(pair._batches.turns.values()) > 0
        assert stats["policy_version"] == state["policy_version"] == pair.policy_version
        assert pair.profile().turns >= state["frames"]
        pair.next()
        version = update(pair)
        pair.load_state_dict(state)
        assert pair.stats()["frames"] == stats["frames"]
        assert of(pair.next()) == [version] * 4  # as the weights that were sent
        pair.next()
        frames, other = pair.stats()["frames"], {**state["worker1"], "traj_pool": {}}
        with pytest.raises(ValueError, match="traj_id, missing"):
            pair.load_state_dict({**state, "worker1": other})
        assert pair.stats()["frames"] == pair.state_dict()["frames"] == frames
        with pytest.raises(ValueError, match="state_dict: expected worker0 to worker1"):
            pair.load_state_dict({"worker0": state["worker0"]})

    def test_postprocessing_runs_in_the_actors(self, pair):
        pair.set_postproc(ray_dialogs.marked)
        try:
            assert "marked" in pair.next()
            with pytest.raises(RuntimeError, match="postproc: expected a collector without one"):
                pair.set_postproc(ray_dialogs.marked)
            assert pair.postproc is ray_dialogs.marked
        finally:
            pair.postproc = None
        assert "marked" not in pair.next()

    def test_staleness_needs_no_versions_that_a_postprocessing_leaves(self, pair):
        pair.max_staleness = 0
        pair.postproc = ray_dialogs.only_seen
        try:
            assert list(pair.next().keys()) == ["seen"]
        finally:
            pair.max_staleness = pair.postproc = None

    def test_verbose_logs_a_line_for_each_batch_here(self, pair, caplog):
        pair.verbose = True
        pair._batches.ask()
        ray.wait(list(pair._batches.under_way), num_returns=2)
        version = update(pair)
        with caplog.at_level("INFO", logger="fusedrl"):
            list(islice(pair, 2))
        pair.verbose = False
        lines = [record for record in caplog.records if record.msg.startswith("%s: ")]
        assert lines[0].getMessage().startswith(f"RayLLMCollector: turns={lines[0].turns} ")
        assert [(line.version, line.staleness) for line in lines] == [(version, 1), (version, 0)]
        assert lines[1].turns - lines[0].turns == 4 and lines[1].turns_per_s > 0

    def test_a_progress_bar_here(self, pair, capsys):
        pytest.importorskip("rich")
        pair.progress = True
        list(islice(pair, 1))
        pair.progress = False
        shown = " ".join(capsys.readouterr().out.split())
        assert re.search(rf"turns/s, version {pair.policy_version}, staleness 0", shown)

    def test_hooks_run_in_the_actors(self, pair):
        pair.set_post_collect_hook(ray_dialogs.marked)
        assert pair.post_collect_hook is ray_dialogs.marked
        assert "marked" in pair.next()
        pair.post_collect_hook = None
        assert "marked" not in pair.next()
        pair.pre_collect_hook = None
        assert pair.pre_collect_hook is None

    def test_what_the_first_actor_has(self, pair):
        version = pair.policy_version
        pair.next()
        assert pair.getattr_env("lazy") is False
        assert pair.getattr_policy("in_keys") == ["seen"]
        assert pair.get_model("policy").module.value.item() == version
        with pytest.raises(AttributeError, match="policy: expected a wrapper with a model"):
            pair.get_policy_model()

    def test_a_rollout_does_not_count(self, pair):
        frames = pair.stats()["frames"]
        assert of(pair.rollout()) == [pair.policy_version] * 2
        assert pair.stats()["frames"] == frames

    def test_a_reset_starts_new_dialogs(self, pair):
        pair._batches.ask()
        pair.reset()
        assert (pair.next()["seen"] % 100 == 0).all()
        with pytest.raises(NotImplementedError, match="index: expected None"):
            pair.reset(1)

    def test_a_batch_that_waits_for_too_long_is_dropped(self, pair):
        pair.max_staleness = 0
        try:
            pair._batches.ask()
            ray.wait(list(pair._batches.under_way), num_returns=2)
            version = update(pair)
            assert of(pair.next()) == [version] * 4
            assert pair.stale_turns == 4
        finally:
            pair.max_staleness = None

    def test_the_rest_of_the_surface(self, pair):
        assert isinstance(pair, TorchrlRayLLMCollector)
        assert pair.is_initialized() and not pair.is_running()
        assert pair.total_dialog_turns == float("inf") and pair.init_random_frames == 0
        assert isinstance(pair.set_seed(1), int)
        assert "2 actors" in repr(pair)
        assert isinstance(pair.policy_version_tracker, PolicyVersion)
        pair.init_updater()
        with pytest.raises(RuntimeError, match="replay_buffer: expected one"):
            pair.start()
