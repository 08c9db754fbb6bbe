"""AsyncCollector beside torchrl's: the same batches of the same environments and seeds."""

from __future__ import annotations

import multiprocessing
import warnings
from typing import Any

import pytest
import torch
import torchrl.collectors._multi_base
from async_workers import linear, ones, seeded_vec_env, with_truncation
from tensordict import TensorDictBase
from torchrl.collectors import AsyncCollector as TorchrlAsyncCollector
from torchrl.testing.mocking_classes import CountingEnv

import fusedrl.collectors.process.async_collector
from fusedrl import AsyncCollector

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are spawned import for seconds."""
    context = multiprocessing.get_context("fork")
    ours, theirs = fusedrl.collectors.process.async_collector, torchrl.collectors._multi_base
    monkeypatch.setattr(ours, "process_context", lambda: context)
    monkeypatch.setattr(theirs, "_get_mp_ctx", lambda: context)


SMALL = {"frames_per_batch": 6, "total_frames": 24}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "short trajectories": {"max_frames_per_traj": 4},
    "not divisible": {"total_frames": 20},
    "split": {"split_trajs": True, "max_frames_per_traj": 4},
    "truncated": {"set_truncated": True, "env": with_truncation},
    "reset at each": {"reset_at_each_iter": True},
    "arguments of the environment": {"create_env_kwargs": {"max_steps": 2}},
    "no buffers": {"use_buffers": False},
    "devices": {
        "device": "cpu",
        "storing_device": "cpu",
        "env_device": "cpu",
        "policy_device": "cpu",
    },
    "compact": {"compact_obs": True},
    "whole trajectories": {"trajs_per_batch": 2, "traj_format": "cat", "total_frames": 48},
    "padded trajectories": {"trajs_per_batch": 2, "traj_format": "padded", "total_frames": 48},
    "postproc": {"postproc": lambda batch: batch[1:].set("_private", batch["observation"][1:])},
}


def collect(cls: Any, options: dict[str, Any], seed: int | None = None) -> tuple[list[Any], Any]:
    """Copies of every batch, and what else is to be equal."""
    options = SMALL | options
    env, policy = options.pop("env", CountingEnv), options.pop("policy", ones)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collector = cls(env, policy, **options)
    try:
        last = None if seed is None else collector.set_seed(seed)
        batches = [batch if batch is None else batch.clone() for batch in collector]
        state = collector.state_dict()
        facts = (
            last,
            len(collector),
            collector.total_frames,
            collector.requested_frames_per_batch,
            collector.storing_device,
            collector.policy_device,
            collector.env_device,
            state["frames"],
            state["iter"],
            sorted(state),
            sorted(state["worker0"]),
            collector.stats()["frames"],
        )
    finally:
        collector.shutdown()
    return batches, facts


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert (ours.shape, ours.device, ours.names) == (theirs.shape, theirs.device, theirs.names)
    assert set(map(str, ours.keys(True))) == set(map(str, theirs.keys(True)))
    for key in theirs.keys(True, True):
        x, y = ours.get(key), theirs.get(key)
        assert (x.dtype, x.shape, x.device) == (y.dtype, y.shape, y.device), key
        assert torch.equal(x, y), key


@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_batches_frames_and_state(options):
    ours, facts = collect(AsyncCollector, options)
    theirs, torchrls = collect(TorchrlAsyncCollector, options)
    assert facts == torchrls
    assert len(ours) == len(theirs) > 1
    for x, y in zip(ours, theirs, strict=True):
        assert_same(x, y)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"init_random_frames": 10, "split_trajs": True, "max_frames_per_traj": 4},
        {"update_at_each_batch": True, "set_truncated": False, "total_frames": 20},
    ],
    ids=["plain", "random frames", "updates"],
)
def test_the_same_seed_gives_the_same_frames(options):
    batches = []
    for cls in (AsyncCollector, TorchrlAsyncCollector):
        torch.manual_seed(0)  # the policy's weights
        given = {"env": seeded_vec_env, "policy": linear(), **options}
        batches.append(collect(cls, given, seed=3))
    (ours, facts), (theirs, torchrls) = batches
    assert facts[0] == torchrls[0] and len(ours) == len(theirs) > 1
    for x, y in zip(ours, theirs, strict=True):
        assert_same(x, y)
