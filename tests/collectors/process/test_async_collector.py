"""AsyncCollector: weights, versions, dialogs, buffers, state, and what it refuses."""

from __future__ import annotations

import functools
import queue
import time
from typing import Any

import pytest
import torch
from async_workers import linear, seeded_vec_env
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting
from sync_workers import canary_policy, weights_of
from tensordict import TensorDict
from torchrl.collectors import AsyncCollector as TorchrlAsyncCollector
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.testing.mocking_classes import CountingEnv, CountingEnvCountPolicy
from torchrl.weight_update import SharedMemWeightSyncScheme
from weights_workers import Ones, Uneven

from fusedrl import (
    AsyncCollector,
    LLMCollector,
    MultiProcessedRemoteWeightUpdate,
    VanillaLocalWeightUpdater,
    WeightChannel,
    aSyncDataCollector,
)

pytestmark = pytest.mark.usefixtures("forked")


def test_every_frame_has_the_version_of_its_weights(make):
    collector = make(
        Ones,
        canary_policy(),
        frames_per_batch=20,
        total_frames=400,
        prefetch=2,
        track_policy_version=True,
    )
    assert collector.policy_version == collector.get_policy_version() == 1
    seen = []
    for batch in collector:
        low = batch["low"].flatten()
        for other in (batch["high"], batch["policy_version"], batch["next", "policy_version"]):
            assert torch.equal(low, other.flatten().float())
        seen += low.tolist()
        for _ in range(3):
            collector.update_policy_weights_(weights_of(collector.policy_version + 1.0))
    assert seen == sorted(seen) and len(set(seen)) > 5
    assert collector.policy_version == 1 + 3 * 20


@pytest.mark.parametrize(
    "options",
    [
        {"split_trajs": True, "frames_per_batch": 6},
        {"trajs_per_batch": 2, "traj_format": "padded", "frames_per_batch": 4},
    ],
    ids=["split", "whole"],
)
def test_what_fills_up_short_trajectories_has_no_version(make, options):
    collector = make(
        Uneven,
        canary_policy(),
        total_frames=36,
        prefetch=0,
        track_policy_version=True,
        max_staleness=2,
        **options,
    )
    filled = 0
    for batch in collector:
        mask, low = batch["collector", "mask"], batch["low"].squeeze(-1)
        for part in (batch, batch["next"]):
            assert torch.equal(part["policy_version"], torch.where(mask, low, -1).long())
        span = collector.policy_version_tracker.span(batch)
        assert span == (low[mask].min(), low[mask].max())
        filled += int((~mask).sum())
        collector.update_policy_weights_(weights_of(collector.policy_version + 1.0))
    assert filled > 0 and collector.policy_version > 4 and collector.stale_frames == 0


def test_a_channel_of_others_brings_weights_to_torchrls_collector(make):
    trained = canary_policy()
    with WeightChannel.create(trained) as channel:
        collector = make(
            Ones,
            canary_policy(0.0),
            channel=channel.handle,
            track_policy_version=True,
            total_frames=12,
        )
        seen = []
        for batch in collector:
            assert torch.equal(batch["low"], batch["high"])
            assert batch["low"].flatten().tolist() == batch["policy_version"].tolist()
            seen += batch["low"].flatten().tolist()
            version = channel.publish(weights_of((channel.version or 0) + 1.0))
            assert collector.policy_version == version
        assert seen[0] == 0 < seen[-1]
        with pytest.raises(RuntimeError, match="come through it"):
            collector.update_policy_weights_(trained)
        collector.update_policy_weights_()


def test_a_channel_of_others_brings_weights_to_dialogs(make):
    with WeightChannel.create(policy_of(Says(0))) as channel:
        collector = make(
            Counting,
            policy_of(Says(0)),
            collector_class=LLMCollector,
            channel=channel.handle,
            track_policy_version=True,
            total_frames=16,
            prefetch=0,
        )
        versions = []
        for batch in collector:
            versions.append(of(batch))
            channel.publish(policy_of(Says(len(versions))))
        assert versions == [[n] * 4 for n in range(4)]


def test_dialogs_weights_and_profile(make):
    collector = make(
        Counting,
        policy_of(Says(1)),
        collector_class=LLMCollector,
        total_frames=24,
        prefetch=0,
        track_policy_version=True,
    )
    versions = []
    for batch in collector:
        assert batch.shape == (2, 2) and ("collector", "traj_ids") in batch.keys(True)
        versions.append(of(batch))
        collector.update_policy_weights_(policy_of(Says(collector.policy_version + 1)))
    assert versions == [[n] * 4 for n in range(1, 7)]  # collected on demand
    assert collector.getattr_env("steps") == 12
    assert collector.map_fn("policy_version.__add__", [(1,)]) == [8]


@pytest.mark.parametrize(
    "options",
    [{}, {"collector_class": LLMCollector, "policy": policy_of(Says(1))}],
    ids=["frames", "dialogs"],
)
def test_torchrls_profiler_runs_in_the_worker(make, tmp_path, options):
    seen = []
    env = Counting if options else CountingEnv
    collector = make(env, total_frames=16, post_collect_hook=seen.append, **options)
    trace = str(tmp_path / "trace {worker_idx}.json")
    collector.enable_profile(save_path=trace, num_rollouts=2, warmup_rollouts=1)
    assert len(list(collector)) == 4
    assert "aten::" in (tmp_path / "trace 0.json").read_text()
    collector.disable_profile()
    assert collector.post_collect_hook == seen.append


def test_completed_dialogs_on_a_budget(make):
    collector = make(
        Counting,
        None,
        policy_factory=lambda: policy_of(Says(1)),
        collector_class=LLMCollector,
        dialog_turns_per_batch=6,
        total_dialog_turns=60,
        frames_per_batch=None,
        yield_only_last_steps=True,
        max_staleness=0,
        track_policy_version=True,
    )
    assert collector.policy_version == 0
    batch = collector.next()
    assert batch.shape == (6,) and batch["next", "done"].all()
    collector.increment_version()
    assert collector.policy_version == 1
    rest = list(collector)
    assert rest and all((batch["policy_version"] == 1).all() for batch in rest)
    assert collector.next() is None


def test_a_bound_on_staleness_that_is_set_later_holds(make):
    untracked = make(Ones)
    with pytest.raises(ValueError, match="max_staleness: expected integer versions"):
        untracked.max_staleness = 1
    assert untracked.max_staleness is None
    options = {"total_frames": 24, "prefetch": 3, "track_policy_version": True}
    collector = make(Ones, canary_policy(), **options)
    collector.next()
    collector._worker.batch(collector._batches.number, None)  # the next one is there
    collector.max_staleness = 0
    collector.update_policy_weights_(weights_of(2.0))
    assert all(batch["low"].unique().tolist() == [2.0] for batch in collector)
    assert collector.stale_frames >= 4


def test_stale_batches_are_dropped_and_counted(make, caplog):
    collector = make(
        Ones,
        canary_policy(),
        total_frames=24,
        prefetch=3,
        max_staleness=0,
        track_policy_version=True,
    )
    first = collector.next()
    collector._worker.batch(collector._batches.number, None)  # the next one is there, and stays
    collector.update_policy_weights_(weights_of(2.0))
    rest = list(collector)
    assert first["low"].unique().tolist() == [1.0]
    assert all(batch["low"].unique().tolist() == [2.0] for batch in rest)
    assert collector.stale_frames >= 4 and collector.stale_frames + 4 * len(rest) == 20
    assert caplog.text.count("is said once") == 1


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_an_updaters_update_is_one_version(make, kind):
    policy = canary_policy()
    own = TensorDict.from_module(policy)
    if kind == "local":
        updater: Any = VanillaLocalWeightUpdater(None, own)
    else:
        updater = MultiProcessedRemoteWeightUpdate(None, {torch.device("cpu"): own})
    collector = make(
        Ones, policy, weight_updater=updater, track_policy_version=True, prefetch=0, total_frames=12
    )
    for n, batch in enumerate(collector, 1):
        assert batch["low"].unique().tolist() == batch["policy_version"].unique().tolist() == [n]
        if n == 1:
            collector.update_policy_weights_(weights_of(2.0))
        else:
            updater(weights_of(n + 1.0))
        assert collector.policy_version == n + 1
    assert updater.collector is collector


def test_a_module_without_weights_needs_no_channel(make):
    policy = CountingEnvCountPolicy(CountingEnv().action_spec)
    collector = make(policy=policy, prefetch=0, total_frames=8, track_policy_version=True)
    for number, batch in enumerate(collector):
        assert (batch["next", "policy_version"] == number).all()
        collector.increment_version()


def test_batches_are_the_callers_own(make):
    collector = make(total_frames=40, prefetch=3)
    batches, copies = [], []
    for batch in collector:
        batch["reward_to_go"] = torch.zeros(4)
        batches.append(batch)
        copies.append(batch.clone())
    collector.shutdown()
    for batch, copied in zip(batches, copies, strict=True):
        assert (batch == copied).all()
        batch.zero_()


def test_a_buffer_is_filled_by_iterating_or_from_a_thread(make):
    buffer = ReplayBuffer(storage=LazyTensorStorage(100))
    collector = make(replay_buffer=buffer, total_frames=20)
    iterator = iter(collector)
    assert next(iterator) is None and len(buffer) == 4
    collector.start()
    with collector.pause():
        before = len(buffer)
        assert len(buffer) == before
    collector._thread.join()
    assert len(buffer) == 20 and not collector.is_running()
    collector.async_shutdown()


def test_state_goes_into_another_collector(make, monkeypatch):
    options = {"track_policy_version": True, "total_frames": 12, "max_frames_per_traj": 3}
    first = make(Ones, canary_policy(), **options)
    for version in range(2, 6):
        first.update_policy_weights_(weights_of(float(version)))
    ids = first.next()["collector", "traj_ids"].tolist()
    state = first.state_dict()
    assert state["policy_version"] == 5 and state["frames"] == 4
    wait = functools.partial(time.sleep, 0.05)  # batches are asked for, and not begun
    second = make(Ones, canary_policy(), prefetch=2, pre_collect_hook=wait, **options)
    second.next()
    scheme = second._weight_sync_schemes["policy"]
    send = scheme.send

    def send_late(*args, **kwargs):
        time.sleep(0.2)  # the worker collects if nothing holds it
        send(*args, **kwargs)

    monkeypatch.setattr(scheme, "send", send_late)
    second.load_state_dict(state)
    assert second.stats()["batches"] == first.stats()["batches"] == 1
    batches = list(second)
    assert second._frames == 12 and len(batches) == 2
    assert batches[0]["low"].unique().tolist() == [5.0]
    assert batches[0]["policy_version"].unique().tolist() == [5]
    assert min(batches[0]["collector", "traj_ids"].tolist()) > max(ids)


def test_random_frames_come_first(make):
    options = {"init_random_frames": 6, "total_frames": 12, "update_at_each_batch": True}
    collector = make(seeded_vec_env, linear(), track_policy_version=True, **options)
    assert collector.set_seed(0) == collector.set_seed(0)
    versions = [batch["policy_version"].max().item() for batch in collector]
    assert len(versions) == 3 and collector.policy_version == 5


def test_it_is_torchrls_under_both_names(make):
    assert issubclass(AsyncCollector, TorchrlAsyncCollector)
    assert aSyncDataCollector is AsyncCollector


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"frames_per_batch": None}, TypeError, "frames_per_batch"),
        ({"reset_when_done": False}, ValueError, "reset_when_done"),
        ({"frames_per_batch": 0}, ValueError, "frames_per_batch: expected 1 or more frames, got 0"),
        ({"frames_per_batch": -1}, ValueError, "frames_per_batch: .* got -1"),
        ({"frames_per_batch": 2.5}, TypeError, "frames_per_batch: .* got 2.5"),
        ({"frames_per_batch": "4"}, TypeError, "frames_per_batch: .* got '4'"),
        ({"frames_per_batch": True}, TypeError, "frames_per_batch: .* got True"),
        ({"total_frames": 0}, ValueError, "total_frames: .* got 0; -1 never ends"),
        ({"total_frames": 2.5}, TypeError, "total_frames: .* got 2.5"),
        ({"total_frames": "8"}, TypeError, "total_frames: .* got '8'"),
        ({"max_frames_per_traj": -1}, ValueError, "max_frames_per_traj: .* got -1"),
        ({"init_random_frames": "all"}, TypeError, "init_random_frames: .* got 'all'"),
        ({"trajs_per_batch": 0}, ValueError, "trajs_per_batch: .* got 0"),
        ({"trajs_per_write": 0.5}, TypeError, "trajs_per_write: .* got 0.5"),
        ({"num_threads": -1}, ValueError, "num_threads: .* got -1"),
        ({"num_sub_threads": None}, TypeError, "num_sub_threads: .* got None"),
        ({"channel_mode": "move"}, ValueError, "channel_mode: .* got 'move'"),
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"prefetch": None}, TypeError, "prefetch: .* got None"),
        ({"prefetch": 1.5}, TypeError, "prefetch: .* got 1.5"),
        ({"timeout": -1}, ValueError, "timeout"),
        ({"timeout": 0}, ValueError, "timeout: expected more than 0 seconds, got 0"),
        ({"timeout": "1"}, TypeError, "timeout: .* got str"),
        ({"timeout": float("nan")}, ValueError, "timeout: .* got nan"),
        (
            {"max_staleness": 0.5, "track_policy_version": True},
            TypeError,
            "max_staleness: .* got 0.5",
        ),
        (
            {"collector_class": LLMCollector, "dialog_turns_per_batch": 0},
            ValueError,
            "dialog_turns_per_batch: expected 1 or more turns, got 0",
        ),
        (
            {"collector_class": LLMCollector, "total_dialog_turns": "8"},
            TypeError,
            "total_dialog_turns: .* got '8'",
        ),
        (
            {"collector_class": LLMCollector, "dialog_turns_per_batch": 8},
            TypeError,
            "dialog_turns_per_batch: expected it or frames_per_batch, .* got 8 and 4",
        ),
        ({"max_staleness": -1, "track_policy_version": True}, ValueError, "max_staleness"),
        ({"max_staleness": 1}, ValueError, "max_staleness"),
        ({"channel": 1}, TypeError, "channel"),
        ({"flatten_data": True}, TypeError, "flatten_data"),
        ({"collector_class": TorchrlLLMCollector}, ValueError, "collector_class"),
        ({"collector_class": LLMCollector, "split_trajs": True}, TypeError, "split_trajs"),
        ({"collector_class": LLMCollector, "unknown": True}, TypeError, "unknown"),
        ({"weight_sync_schemes": {}, "weight_updater": 1}, TypeError, "weight_updater"),
        (
            {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()}},
            ValueError,
            "ChannelWeightSyncScheme",
        ),
        ({"track_policy_version": "yes"}, TypeError, "track_policy_version"),
        (
            {"collector_class": LLMCollector, "queue": queue.Queue(), "replay_buffer": object()},
            RuntimeError,
            "queue: expected a queue or a replay_buffer, got both",
        ),
        ({"create_env_kwargs": [{}, {}]}, ValueError, "create_env_kwargs"),
    ],
)
def test_what_is_refused_before_a_process_is_started(make, options, error, message):
    with pytest.raises(error, match=message):
        make(**options)


def test_shutdown_raises_what_closing_raises_unless_told_not_to(make, monkeypatch):
    def stuck():
        raise ValueError("stuck")

    first, second = make(), make()
    for collector in (first, second):
        monkeypatch.setattr(collector._weights, "close", stuck)
    with pytest.raises(ValueError, match="stuck"):
        first.shutdown()
    second.shutdown(raise_on_error=False)
    assert first.closed and second.closed and not first.procs and not second.procs


def test_totals_may_be_whole_floats_as_torchrls(make):
    assert len(list(make(total_frames=8.0))) == 2
    assert make(total_frames=float("inf")).total_frames == float("inf")


def test_what_is_set_later_holds_from_the_next_batch(make):
    collector = make()
    batches = iter(collector)
    assert next(batches).shape == (4,)
    collector.postproc = lambda batch: batch[:1]
    assert next(batches).shape == (1,)
    collector.postproc, collector.total_frames = None, 12
    assert [batch.shape for batch in batches] == [(4,)] and len(collector) == 3


@pytest.mark.parametrize("own", ["storing_device", "env_device", "policy_device"])
def test_device_stands_in_for_those_that_are_left_out(make, own):
    """``cpu:0`` is the same place under a name of its own."""
    collector = make(device="cpu", total_frames=4, **{own: "cpu:0"})
    for name in ("storing_device", "env_device", "policy_device"):
        expected = [torch.device("cpu:0" if name == own else "cpu")]
        assert list(getattr(collector, name)) == expected == collector.get_distant_attr(name)
    assert collector.next().shape == (4,)


def test_start_and_shutdown_say_what_they_need(make):
    collector = make()
    with pytest.raises(RuntimeError, match="replay_buffer"):
        collector.start()
    with pytest.raises(RuntimeError, match="close_env"):
        collector.shutdown(close_env=False)
    with pytest.raises(RuntimeError, match="pause"), collector.pause():
        pass
    with pytest.raises(AttributeError, match="missing") as raised:
        collector.getattr_env("missing")
    assert "in getattr_env" in str(raised.value.__cause__)
    assert collector.next().shape == (4,)  # a refused call ends nothing
