"""RayLLMCollector: actors on two nodes, their weights, batches, buffers, errors and end."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import ray_dialogs
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting
from counting_dialogs import policy as numbers_policy
from ray_dialogs import runs, wait_for
from ray_nodes import NODES, nodes
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors.llm import RayLLMCollector as TorchrlRayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer

from fusedrl import (
    PolicyVersion,
    RayLLMCollector,
    RayRemoteWeightUpdater,
    VanillaLocalWeightUpdater,
)

ray = pytest.importorskip("ray")

ON_NODES = [{"num_cpus": 0, "resources": {node: 0.1}} for node in NODES]


@pytest.fixture(scope="module")
def cluster() -> Any:
    return nodes.start()


def make(env: Any = Counting, **options: Any) -> RayLLMCollector:
    given = {
        "policy_factory": None if "policy" in options else ray_dialogs.says,
        "dialog_turns_per_batch": 4,
        "track_policy_version": True,
        "num_cpus": 0,
    }
    return RayLLMCollector(env, **(given | options))


@pytest.fixture
def collect(cluster) -> Iterator[Callable[..., RayLLMCollector]]:
    """Collectors of one test; an actor takes seconds to start, so most tests share ``pair``."""
    made = []

    def collect(*args: Any, **options: Any) -> RayLLMCollector:
        made.append(make(*args, **options))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown(raise_on_error=False)


@pytest.fixture(scope="module")
def pair_of_actors(cluster) -> Iterator[RayLLMCollector]:
    with make(remote_config=ON_NODES) as collector:
        yield collector


@pytest.fixture
def pair(pair_of_actors) -> RayLLMCollector:
    """An actor on each node, that have the same version of weights which are their version."""
    update(pair_of_actors)
    return pair_of_actors


def weights_of(version: float) -> TensorDict:
    return TensorDict.from_module(policy_of(Says(version))).data


def update(collector: RayLLMCollector) -> int:
    """Weights that are their version."""
    collector.update_policy_weights_(weights_of(collector.policy_version + 1))
    return collector.policy_version


def pids(collector: RayLLMCollector) -> list[int]:
    return [started.pid for started in collector._actors.started]


class TestTwoNodes:
    def test_there_is_an_actor_on_each(self, pair, cluster):
        nodes = {handle: node for node in ray.nodes() for handle in node["Resources"]}
        where = [
            ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))
            for actor in pair._actors.handles
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
            ({"weights": weights_of(1), "policy": policy_of(Says())}, "one argument"),
            ({"weights": weights_of(1), "worker_ids": 0}, r"worker_ids: expected None or all"),
            ({"weights": weights_of(1), "model_id": "value"}, "model_id: expected 'policy'"),
            ({"weights_dict": {"value": weights_of(1)}}, "model_id: expected 'policy'"),
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

    @pytest.mark.parametrize("work", [ray_dialogs.raise_unpicklable, ray_dialogs.raise_unreadable])
    def test_an_exception_that_cannot_be_sent_comes_as_its_traceback(self, pair, work):
        reference = pair._actors.handles[1].__ray_call__.remote(work)
        told = rf"answer of actor 1 \(pid {pids(pair)[1]} on .*\), got .*: no such lock; its traceb"
        with pytest.raises(RuntimeError, match=told) as caught:
            pair._actors.answer(reference, 1)
        assert work.__name__ in str(caught.value.__cause__)

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
        assert all(str(pid) in repr(pair) for pid in pids(pair))
        assert isinstance(pair.policy_version_tracker, PolicyVersion)
        pair.init_updater()
        with pytest.raises(RuntimeError, match="replay_buffer: expected one"):
            pair.start()


class TestWhileThePolicyRuns:
    def test_an_update_waits_for_no_call_and_is_not_half_taken(self, collect, tmp_path):
        """Then the actor is killed, which is an error that names it."""
        factory = partial(pausing, str(tmp_path))
        collector = collect(
            policy_factory=factory,
            sync_iter=False,
            dialog_turns_per_batch=2,
            total_dialog_turns=float("inf"),
        )
        batches = iter(collector)
        collector._batches.ask()
        wait_for((tmp_path / "begun").exists)
        for version in (1, 2):  # returns, though the call goes on only after it
            collector.update_policy_weights_(factory(float(version)))
        (tmp_path / "go on").touch()
        first, second = next(batches), next(batches)
        assert first["action"].flatten().tolist() == first["policy_version"].flatten().tolist()
        assert first["action"].flatten().tolist() == [0, 0]
        assert second["policy_version"].flatten().tolist() == [2, 2]
        assert second["action"].flatten().tolist() == [2002, 2002]
        # The next batch is collected though nobody asks.
        wait_for(lambda: collector._actors.one(0, "get", "_frames") >= 6)
        (pid,) = pids(collector)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match=rf"got a dead one, actor 0 \(pid {pid} on .*\)"):
            for _ in batches:
                pass
        assert not collector.is_initialized()
        with pytest.raises(RuntimeError, match="got one after shutdown"):
            collector.next()


def pausing(folder: str, value: float = 0.0) -> TensorDictModule:
    return policy_of(ray_dialogs.Pausing(folder, value))


class TestBuffers:
    def test_actors_extend_a_buffer_that_is_an_actor(self, collect):
        buffer = RayReplayBuffer(
            storage=partial(LazyStackStorage, 50), batch_size=3, remote_config={"num_cpus": 0}
        )
        trained = policy_of(Says(3))
        collector = collect(
            policy=trained,
            policy_factory=None,
            replay_buffer=buffer,
            total_dialog_turns=12,
        )
        assert list(collector) == [None] * 3
        assert collector.next() is None and len(buffer) == 12
        assert buffer.sample()["action"].flatten().tolist() == [3] * 3
        assert collector.total_dialog_turns == collector.stats()["frames"] == 12
        buffer.close()

    def test_a_buffer_of_this_process_and_the_background(self, collect):
        """The policy that it was given is what an update without weights sends."""
        buffer = ReplayBuffer(storage=LazyStackStorage(1000), batch_size=3)
        trained = policy_of(Says(0))
        collector = collect(policy=trained, replay_buffer=buffer, total_dialog_turns=None)
        assert collector.next() is None and buffer[:].shape == (4,)
        assert collector.total_dialog_turns == float("inf")
        assert collector.getattr_rb("write_count") == 4
        collector.start()
        assert collector.is_running()
        for ask in (collector.next, partial(list, collector)):
            with pytest.raises(RuntimeError, match="iterated or start"):
                ask()
        assert collector.is_running()
        torch.nn.init.constant_(trained.module.value, 1.0)
        collector.update_policy_weights_()
        wait_for(lambda: 1 in buffer[:]["policy_version"].tolist())
        assert buffer[:]["policy_version"].tolist() == buffer[:]["action"].flatten().tolist()
        (pid,) = pids(collector)
        collector.async_shutdown()
        assert not collector.is_running() and not collector.is_initialized()
        wait_for(lambda: not runs(pid))


def test_updaters_of_users_run_in_the_actors(collect):
    """Then one raises an exception, which comes with its traceback."""
    collector = collect(sync_iter=False, dialog_turns_per_batch=2)
    assert of(collector.next()) == [0, 0]
    assert collector.set_weight_updater(VanillaLocalWeightUpdater(None, None))
    collector.update_policy_weights_(weights_of(1))
    assert collector.policy_version == 1
    assert of(next(b for b in collector if b["policy_version"].max() > 0)) == [1, 1]

    ours = ray_dialogs.Tenfold()
    for _ in range(2):
        collector.weight_updater = ours
    assert collector.weight_updater is ours
    collector.init_updater(2.0)
    collector.update_policy_weights_(weights_of(3))
    batch = next(b for b in collector if b["policy_version"].max() > 1)
    assert batch["action"].flatten().tolist() == [6, 6] and collector.policy_version == 2
    state = collector.state_dict()
    collector.update_policy_weights_(weights_of(4))
    collector.load_state_dict(state)
    assert collector.policy_version == 2
    batch = collector.next()
    assert batch["action"].flatten().tolist() == [6, 6]
    assert batch["policy_version"].flatten().tolist() == [2, 2]

    collector.weight_updater = ray_dialogs.Tenfold  # each actor makes one
    assert collector.weight_updater is ray_dialogs.Tenfold
    collector.update_policy_weights_(weights_of(3))
    batch = next(b for b in collector if b["policy_version"].max() > 2)
    assert batch["action"].flatten().tolist() == [30, 30]

    collector.set_post_collect_hook(ray_dialogs.failing)
    (pid,) = pids(collector)
    collector.next()  # was ready by then
    with pytest.raises(LookupError, match="no such batch") as caught:
        collector.next()
    assert "ray_dialogs.py" in str(caught.value.__cause__)
    assert not collector.is_initialized()
    wait_for(lambda: not runs(pid))


def test_chats_with_a_model_that_generates(collect):
    trained = ray_dialogs.generating(do_sample=False)
    collector = collect(
        [ray_dialogs.chat_env, ray_dialogs.dataset_env],
        policy=trained,
        dialog_turns_per_batch=4,
        total_dialog_turns=12,
    )
    versions, answers = [], []
    assert collector.total_dialog_turns == 12
    for batch in collector:
        flat = batch.reshape(-1)
        versions.append(flat["next", "policy_version"].tolist())
        answers.append([row.tolist() for row in flat.get(("tokens", "response"), as_list=True)])
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5)
        collector.update_policy_weights_(trained.model)
    assert versions == [[n] * 4 for n in range(3)]
    assert answers[0][:2] == answers[0][2:] and answers[0] != answers[1]
    called = collector.get_policy_model().lm_head.weight  # before the last update
    torch.testing.assert_close(1.5 * called, trained.model.lm_head.weight.data)


def test_no_place_for_an_actor_is_an_error(collect):
    with pytest.raises(RuntimeError, match=r"expected places for 1 actors within 1\.0 s, got 0"):
        collect(num_cpus=500, timeout=1.0)


def test_processes_that_are_slow_to_start_are_no_lack_of_places(collect):
    with pytest.raises(RuntimeError, match=r"timeout: expected processes of 1 actors within 0\.0"):
        collect(timeout=0.001)


def test_the_end_of_the_cluster_is_an_error_and_starts_no_other(pair, monkeypatch):
    """As after ray.shutdown(), and after another ray.init()."""
    ways = (pair.next, lambda: pair.update_policy_weights_(weights_of(1)), pair.profile)
    for name, value in (("is_initialized", lambda: False), ("get_runtime_context", Elsewhere)):
        with monkeypatch.context() as patch:
            patch.setattr(ray, name, value)
            for use in ways:
                with pytest.raises(RuntimeError, match=r"since ray\.shutdown\(\) was called"):
                    use()
    assert not pair.closed and pair.next() is not None


class Elsewhere:
    gcs_address = "another:1"


def test_a_shutdown_after_an_actor_has_died_raises_nothing(collect):
    collector = collect(num_collectors=2)
    os.kill(pids(collector)[0], signal.SIGKILL)
    for _ in range(3):
        collector.shutdown()


def test_a_bound_on_staleness_that_cannot_be_counted_is_refused(collect):
    collector = collect(track_policy_version=False)
    with pytest.raises(ValueError, match="max_staleness: expected integer versions"):
        collector.max_staleness = 1
    assert collector.max_staleness is None


def test_a_policy_that_cannot_be_sent_is_refused(collect):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pass policy_factory="):
        collect(policy=lambda turn: turn if lock else None)
    with pytest.raises(TypeError, match="for env a function that makes it"):
        collect(lambda: lock)


def test_weights_for_a_policy_that_has_none_are_refused_and_not_counted(collect):
    collector = collect(policy=numbers_policy)
    for weights in (weights_of(1), None):
        with pytest.raises(TypeError, match="policy: expected a module"):
            collector.update_policy_weights_(weights)
    assert collector.policy_version == 0
    assert collector.next()["next", "policy_version"].unique().tolist() == [0]


def test_torchrls_profiler_runs_in_the_actors(collect, tmp_path):
    collector = collect(total_dialog_turns=16, num_collectors=2)
    trace = str(tmp_path / "trace {worker_idx}.json")
    options = {"workers": [0, 1], "num_rollouts": 2, "warmup_rollouts": 1}
    collector.enable_profile(save_path=trace, **options)
    assert len(list(collector)) == 4
    assert all("aten::" in (tmp_path / f"trace {n}.json").read_text() for n in (0, 1))
    collector.disable_profile()
    assert collector.post_collect_hook is None
