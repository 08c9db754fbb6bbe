"""Collectors under the channel's weight-sync scheme, and what must hold of their batches."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from sync_workers import weights_of
from torchrl.collectors import AsyncCollector, Collector, MultiSyncCollector
from weights_workers import Ones, make_policy

FRAMES = {"frames_per_batch": 24, "total_frames": -1}


@pytest.fixture
def forked(monkeypatch):
    """Workers are forked: they start in a tenth of the time."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
    context = torch.multiprocessing.get_context("fork")
    module = "fusedrl.collectors.process.async_collector"
    monkeypatch.setattr(f"{module}.process_context", lambda: context)
    yield
    torch.multiprocessing.set_start_method(before, force=True)


@contextlib.contextmanager
def collecting(make, scheme, policy=None, env=Ones, model_id="policy", **options):
    """A collector, and an iterator of its batches."""
    schemes = scheme if isinstance(scheme, dict) else {model_id: scheme}
    one = make in (Collector, AsyncCollector)
    if make is MultiSyncCollector:
        options["cat_results"] = 0
    collector = make(
        env if one else [env, env],
        policy,
        weight_sync_schemes=schemes,
        track_policy_version=options.pop("track_policy_version", True),
        **FRAMES,
        **options,
    )
    try:
        yield collector, iter(collector)
    finally:
        collector.shutdown(timeout=5, raise_on_error=False)
        for scheme in schemes.values():
            scheme.shutdown()


@contextlib.contextmanager
def training(collector, interval: float = 0.001):
    """Another thread publishes version after version."""
    stop, errors = threading.Event(), []

    def train() -> None:
        version = collector._weight_sync_schemes["policy"].version
        while not stop.wait(interval):
            version += 1
            try:
                collector.update_policy_weights_(weights_of(float(version)))
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert errors == []


def versions(batch) -> set[int]:
    """The versions that a batch was computed with: fails where weights are torn or tags wrong."""
    low, high = batch["low"].flatten(), batch["high"].flatten()
    assert low.tolist() == high.tolist()
    assert batch["next", "policy_version"].flatten().tolist() == low.tolist()
    assert batch["policy_version"].flatten().tolist() == low.tolist()
    return set(low.int().tolist())


def check_that_updates_count(collector, iterator) -> None:
    """The policy's one weight, which its actions are, is the number of the update."""
    for version in (1.0, 2.0, 3.0):
        if version > 1:
            collector.update_policy_weights_(make_policy(version))
        batch = next(iterator)
        assert {*batch["action"].flatten().tolist()} == {version}
        assert {*batch["next", "policy_version"].flatten().tolist()} == {version}


def newest(collector, iterator, version: int, batches: int = 8) -> None:
    """Batches are of this version from some batch on; those before were under way."""
    for _ in range(batches):
        if versions(next(iterator)) == {version}:
            return
    raise AssertionError(f"no batch of version {version}")


def check_every_batch(collector, iterator, batches: int) -> None:
    assert versions(next(iterator)) == {1}
    workers = 2 if isinstance(collector, MultiSyncCollector) else 1  # whose batches are one
    seen = set()
    with training(collector):
        for _ in range(batches):
            for part in next(iterator).reshape(-1).chunk(workers):
                (version,) = versions(part)
                seen.add(version)
    assert len(seen) > batches // 2
    last = collector._weight_sync_schemes["policy"].version
    assert collector.policy_version == last  # one update, one version
    newest(collector, iterator, last)
