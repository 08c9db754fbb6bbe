"""The weight updaters: what they write and refuse, and that collectors act by what they send."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.collectors.llm import LLMCollector
from weights_workers import Ones, make_policy

from fusedrl import MultiProcessedRemoteWeightUpdate, VanillaLocalWeightUpdater

CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using WeightUpdaterBase:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl"),
]


def weights_of(policy: nn.Module) -> TensorDict:
    return TensorDict.from_module(policy)


def actions(iterator) -> list[float]:
    return next(iterator)["action"].flatten().tolist()


@pytest.mark.parametrize(
    "source",
    [lambda p: p, weights_of, lambda p: p.state_dict(), lambda p: weights_of(p).half()],
    ids=["module", "tensordict", "state dict", "another dtype"],
)
def test_leaves_that_require_grad_are_written_in_place(source):
    policy, trained = make_policy(), make_policy(3.0)
    leaf = policy.module.weight
    address = leaf.data_ptr()
    VanillaLocalWeightUpdater(None, weights_of(policy).lock_()).update_weights(source(trained))
    assert policy.module.weight is leaf and leaf.data_ptr() == address
    assert leaf.requires_grad and leaf.grad_fn is None
    assert leaf.item() == 3.0


@pytest.mark.parametrize(
    ("weights", "error"),
    [
        (TensorDict({"a": torch.ones(2), "c": torch.ones(2)}), ValueError),
        (TensorDict({"a": torch.ones(2), "b": torch.ones(1)}), ValueError),
        (TensorDict({"a": torch.ones(2, dtype=torch.int64)}), ValueError),
        (torch.ones(2), TypeError),
    ],
    ids=["unknown name", "shape that would broadcast", "integers", "tensor"],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_changes(weights, error):
    first, second = (TensorDict({"a": torch.zeros(2), "b": torch.zeros(2)}) for _ in range(2))
    second["more"] = torch.zeros(1)
    for updater in (
        VanillaLocalWeightUpdater(None, first),
        MultiProcessedRemoteWeightUpdate(None, {0: first, 1: second}),
    ):
        with pytest.raises(error, match=r"(?s)weights: .*expected"):
            updater.update_weights(weights)
    assert first.sum(reduce=True) == 0 == second.sum(reduce=True)


def test_weights_for_no_policy_are_refused():
    VanillaLocalWeightUpdater(None, None)()
    with pytest.raises(RuntimeError, match="policy: expected a module"):
        VanillaLocalWeightUpdater(None, None)(make_policy())


def test_timeouts_that_do_not_end_a_wait_are_refused():
    for timeout in (-1, float("inf")):
        with pytest.raises(ValueError, match="timeout: expected a finite number of seconds"):
            MultiProcessedRemoteWeightUpdate(None, {}, timeout=timeout)


@pytest.mark.parametrize("known", [True, False], ids=["given weights", "the collector's weights"])
@pytest.mark.parametrize("make", [Collector, LLMCollector])
def test_a_collector_acts_by_the_weights_that_were_fetched_or_given(make, known):
    policy, trained = make_policy(), make_policy(3.0)
    updater = VanillaLocalWeightUpdater(lambda: trained, weights_of(policy) if known else None)
    size = {"dialog_turns_per_batch": 2} if make is LLMCollector else {"frames_per_batch": 2}
    collector = make(Ones(), policy=policy, weight_updater=updater, **size)
    iterator = iter(collector)
    with torch.no_grad():
        assert actions(iterator) == [0, 0]
        collector.update_policy_weights_()
        assert actions(iterator) == [3, 3]
        collector.update_policy_weights_(make_policy(5.0))
        assert actions(iterator) == [5, 5]


@pytest.fixture
def forked(monkeypatch):
    """Processes that are spawned import for seconds: some that act by one version are."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr("torchrl.collectors._multi_base._get_mp_ctx", lambda: context)


@contextlib.contextmanager
def two_processes(updater, **policy):
    collector = MultiSyncCollector(
        [Ones, Ones],
        frames_per_batch=2,
        total_frames=-1,
        cat_results="stack",
        weight_updater=updater,
        **policy,
    )
    try:
        yield collector, iter(collector)
    finally:
        collector.shutdown(timeout=5, raise_on_error=False)


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_processes_act_by_shared_weights_and_a_dead_one_is_logged(caplog):
    policy, trained = make_policy(), make_policy(3.0)
    updater = MultiProcessedRemoteWeightUpdate(lambda: trained, {CPU: weights_of(policy)})
    tracked = {"policy": policy, "track_policy_version": True}
    with two_processes(updater, **tracked) as (collector, iterator):
        assert actions(iterator) == [0, 0]
        collector.update_policy_weights_()
        assert actions(iterator) == [3, 3]
        collector.update_policy_weights_(make_policy(5.0), worker_ids="cpu")
        batch = next(iterator)
        assert batch["action"].flatten().tolist() == [5, 5]
        assert batch["next", "policy_version"].flatten().tolist() == [3, 3]  # of the channel

        killed = collector.procs[1]
        killed.kill()
        killed.join(10)
        collector.update_policy_weights_()
        assert f"got dead: pid {killed.pid}; live ones get version 4" in caplog.text


@pytest.mark.heavy
@pytest.mark.usefixtures("forked")
def test_processes_that_make_their_policies_start_with_the_weights_of_the_updater():
    workers = {name: weights_of(make_policy(1.0)) for name in (CPU, "another")}
    updater = MultiProcessedRemoteWeightUpdate(lambda: make_policy(3.0), workers, timeout=30)
    with two_processes(updater, policy_factory=lambda: make_policy(2.0)) as (collector, iterator):
        assert actions(iterator) == [1, 1]
        collector.update_policy_weights_()
        assert actions(iterator) == [3, 3]
        with pytest.raises(ValueError, match="worker_ids: expected all of"):
            collector.update_policy_weights_(make_policy(5.0), worker_ids=[CPU])
        assert [weights["module", "weight"].item() for weights in workers.values()] == [3, 3]

        stopped = collector.procs[0]
        os.kill(stopped.pid, signal.SIGSTOP)
        collector.update_policy_weights_(make_policy(6.0))  # which waits for nobody
        os.kill(stopped.pid, signal.SIGCONT)
        assert actions(iterator) == [6, 6]
