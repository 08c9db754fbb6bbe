"""RayLLMCollector: its weights while the policy runs, buffers, errors and end."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import pytest
import ray_dialogs
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import policy as numbers_policy
from ray_collectors import pids, weights_of
from ray_dialogs import runs, wait_for
from tensordict.nn import TensorDictModule
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer

from fusedrl import VanillaLocalWeightUpdater

ray = pytest.importorskip("ray")


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
        wait_for(lambda: collector._first(getattr, "_frames") >= 6)
        (pid,) = pids(collector)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError, match=str(pid)):
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
    with pytest.raises(LookupError, match=r"(?s)ray_dialogs\.py.*no such batch"):
        collector.next()
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
    with pytest.raises(RuntimeError, match=r"1 actors within 0\.001 s, .* raise timeout"):
        collect(timeout=0.001)


def test_the_end_of_the_cluster_is_an_error_and_starts_no_other(pair, monkeypatch):
    """As after ray.shutdown()."""
    ways = (pair.next, lambda: pair.update_policy_weights_(weights_of(1)), pair.profile)
    with monkeypatch.context() as patch:
        patch.setattr(ray, "is_initialized", lambda: False)
        for use in ways:
            with pytest.raises(RuntimeError, match=r"ray\.shutdown\(\)"):
                use()
    pair._batches.forget()
    assert not pair.closed and pair.next() is not None


def test_without_one_of_the_actors_an_update_is_an_error_and_a_shutdown_is_none(collect):
    collector = collect(num_collectors=2)
    pid = pids(collector)[1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError, match=str(pid)):
        collector.update_policy_weights_(weights_of(1))
    for _ in range(3):
        collector.shutdown()


def test_a_policy_that_cannot_be_sent_is_refused(collect):
    lock = threading.Lock()
    with pytest.raises(TypeError, match="serialize"):
        collect(policy=lambda turn: turn if lock else None)
    with pytest.raises(TypeError, match="serialize"):
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
