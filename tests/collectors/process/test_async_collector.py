"""AsyncCollector: weights, versions, dialogs, buffers, state, and what it refuses."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
from sync_workers import canary_policy, weights_of
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer
from weights_workers import Ones, Uneven

from fusedrl import (
    ChannelWeightSyncScheme,
    MultiProcessedRemoteWeightUpdate,
    VanillaLocalWeightUpdater,
    WeightChannel,
)

from .ends import until

OF_WORKER = {"policy_factory": canary_policy}

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]


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
        with pytest.raises(RuntimeError, match="through it"):
            collector.update_policy_weights_(trained)
        collector.update_policy_weights_()


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
    until(collector._worker._batches.qsize)  # the next one is there
    collector.update_policy_weights_(weights_of(2.0))
    rest = list(collector)
    assert first["low"].unique().tolist() == [1.0]
    assert all(batch["low"].unique().tolist() == [2.0] for batch in rest)
    assert collector.stale_frames >= 4 and collector.stale_frames + 4 * len(rest) == 20
    assert caplog.text.count("logged once") == 1


@pytest.mark.parametrize("kind", ["local", "remote"])
@pytest.mark.parametrize("model", ["policy", "policy.module"])
def test_an_updaters_update_is_one_version(make, kind, model):
    policy = canary_policy()
    own = TensorDict.from_module(policy)
    if kind == "local":
        updater: Any = VanillaLocalWeightUpdater(None, own)
    else:
        updater = MultiProcessedRemoteWeightUpdate(None, {torch.device("cpu"): own})
    scheme = {"weight_sync_schemes": {model: ChannelWeightSyncScheme()}, **OF_WORKER}
    way = {"weight_updater": updater} if model == "policy" else scheme
    collector = make(Ones, policy, **way, track_policy_version=True, prefetch=0, total_frames=12)
    if collector.weight_updater is None:
        collector.weight_updater = updater
    for n, batch in enumerate(collector, 1):
        assert batch["low"].unique().tolist() == batch["policy_version"].unique().tolist() == [n]
        if n == 1:
            collector.update_policy_weights_(weights_of(2.0))
        else:
            updater(weights_of(n + 1.0))
        assert collector.policy_version == n + 1
    assert updater.collector is collector


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


@pytest.mark.parametrize("model", ["policy", "policy.module"])
def test_state_goes_into_another_collector(make, monkeypatch, model):
    options = {"track_policy_version": True, "total_frames": 12, "max_frames_per_traj": 3}
    first = make(Ones, canary_policy(), **options)
    for version in range(2, 6):
        first.update_policy_weights_(weights_of(float(version)))
    ids = first.next()["collector", "traj_ids"].tolist()
    state = first.state_dict()
    assert state["policy_version"] == 5 and state["frames"] == 4
    wait = functools.partial(time.sleep, 0.05)  # batches are asked for, and not begun
    scheme = ChannelWeightSyncScheme()
    options |= {"weight_sync_schemes": {model: scheme}, **OF_WORKER}
    second = make(Ones, canary_policy(), prefetch=2, pre_collect_hook=wait, **options)
    second.next()
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


def test_what_is_set_later_holds_from_the_next_batch(make):
    collector = make()
    batches = iter(collector)
    assert next(batches).shape == (4,)
    collector.postproc = lambda batch: batch[:1]
    assert next(batches).shape == (1,)
    collector.postproc, collector.total_frames = None, 12
    assert [batch.shape for batch in batches] == [(4,)] and len(collector) == 3


def test_start_and_shutdown_say_what_they_need(make):
    collector = make()
    with pytest.raises(RuntimeError, match="replay_buffer"):
        collector.start()
    with pytest.raises(RuntimeError, match="without environment being closed"):
        collector.shutdown(close_env=False)
    with pytest.raises(RuntimeError, match="pause"), collector.pause():
        pass
    with pytest.raises(AttributeError, match="missing") as raised:
        collector.getattr_env("missing")
    assert "in getattr_env" in str(raised.value.__cause__)
    assert collector.next().shape == (4,)  # a refused call ends nothing
