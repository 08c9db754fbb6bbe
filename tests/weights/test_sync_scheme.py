"""The channel's weight-sync scheme: torchrl's collectors compute each batch with one version."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from pathlib import Path

import pytest
import torch
from one_thread import one_thread
from sync_collecting import (
    FRAMES,
    check_every_batch,
    check_that_updates_count,
    collecting,
    forked,
    newest,
    versions,
)
from sync_workers import canary_policy, weights_of
from tensordict import TensorDict
from torchrl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.modules.inference_server import InferenceServer
from torchrl.weight_update import WeightSyncScheme
from weights_workers import Ones, make_policy

from fusedrl import ChannelWeightSyncScheme
from fusedrl.channel.follow import followers_of

__all__ = ["forked", "one_thread"]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.heavy
@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_batches_of_a_collector_in_the_trainers_process_have_one_version_each(mode):
    policy = canary_policy()
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    scheme = ChannelWeightSyncScheme(mode=mode)
    with collecting(Collector, scheme, policy) as (collector, iterator):
        check_every_batch(collector, iterator, 6)
        assert [f.version for f in followers_of(collector.policy)] == [scheme.version]
        assert followers_of(policy) == []
    # The trainer's own model is neither changed nor frozen.
    assert all(x.requires_grad for x in policy.parameters())
    assert all(torch.equal(before[name], x) for name, x in policy.state_dict().items())
    assert collector.policy is policy
    assert isinstance(collector.policy_version_tracker, PolicyVersion)
    assert policy._compiled_call_impl is None and not policy._load_state_dict_pre_hooks


@pytest.mark.heavy
@pytest.mark.parametrize("make", [MultiSyncCollector, MultiAsyncCollector, AsyncCollector])
def test_batches_of_worker_processes_have_one_version_each(make, forked):
    with collecting(make, ChannelWeightSyncScheme(), canary_policy()) as (collector, iterator):
        check_every_batch(collector, iterator, 6)


@pytest.mark.heavy
def test_a_spawned_worker_gets_weights_in_every_form():
    policy = canary_policy()
    scheme = ChannelWeightSyncScheme(strategy="state_dict", dtype=torch.float64)
    with collecting(AsyncCollector, scheme, policy) as (collector, iterator):
        newest(collector, iterator, 1)
        for version, weights in enumerate(
            [
                canary_policy(2.0),
                weights_of(3.0),
                weights_of(4.0).half(),
                canary_policy(5.0).state_dict(),
            ],
            start=2,
        ):
            collector.update_policy_weights_(weights, worker_ids=[0])
            newest(collector, iterator, version)
        with torch.no_grad():
            for x in policy.state_dict().values():
                x.fill_(6.0)
        newest(collector, iterator, 5)  # training in place is not publishing
        collector.update_policy_weights_()
        newest(collector, iterator, 6)


@pytest.mark.heavy
def test_a_killed_worker_is_logged_once_and_holds_nobody_up(caplog, forked):
    scheme = ChannelWeightSyncScheme()
    with collecting(MultiSyncCollector, scheme, canary_policy()) as (collector, iterator):
        next(iterator)
        killed = collector.procs[1]
        killed.kill()
        killed.join(10)
        collector.update_policy_weights_(weights_of(2.0))
        assert f"got dead: pid {killed.pid}; live ones get version 2" in caplog.text
        caplog.clear()
        for version in range(3, 9):  # all slots
            collector.update_policy_weights_(weights_of(float(version)))
        assert caplog.text == ""


def test_updates_in_the_middle_of_a_batch_leave_its_version():
    scheme = ChannelWeightSyncScheme()
    env = Ones()
    step = env._step
    with collecting(Collector, scheme, canary_policy(), env) as (collector, iterator):

        def update_first(tensordict):
            collector.update_policy_weights_(weights_of(scheme.version + 1.0))
            return step(tensordict)

        env._step = update_first
        for version in (1, 25, 49):
            assert versions(next(iterator)) == {version}


@pytest.mark.heavy
def test_copies_of_a_policy_that_follows_have_weights_of_their_own():
    policy, scheme = make_policy(1.0), ChannelWeightSyncScheme()
    with collecting(Collector, scheme, policy) as (collector, iterator):
        check_that_updates_count(collector, iterator)
        for other in (
            copy.deepcopy(collector.policy),
            pickle.loads(pickle.dumps(collector.policy)),
        ):
            other.module.weight.fill_(9.0)
            assert other(TensorDict({"observation": torch.ones(1)}))["action"].item() == 9.0
    assert policy(TensorDict({"observation": torch.ones(1)}))["action"].item() == 1.0


def test_a_worker_holds_no_version_between_two_batches(forked):
    """Otherwise workers that wait for the trainer could hold all slots while it waits for one."""
    scheme = ChannelWeightSyncScheme()
    with collecting(MultiSyncCollector, scheme, canary_policy()) as (_, iterator):
        next(iterator)
        assert [reader.leased for reader in scheme.channel.readers()] == [(), ()]


def test_a_reader_without_a_collector_receives_by_itself():
    scheme, trained, policy = ChannelWeightSyncScheme(), make_policy(1.0), make_policy(0.0)
    scheme.init_on_sender(model_id="policy", model=trained)
    scheme.connect()
    ours = pickle.loads(pickle.dumps(scheme))
    ours.init_on_receiver(model_id="policy", model=policy, worker_idx=0)
    ours.connect(worker_idx=0)
    assert policy.module.weight.item() == 1.0
    assert ours.receive() is None
    assert scheme.send(make_policy(2.0)) == 2
    assert ours.receive()["module", "weight"].item() == 2.0
    assert ours.receive(timeout=0.0) is None
    assert scheme.send(make_policy(9.0), version=9) == 9 == ours.version
    for end in (ours, ours, scheme, scheme):
        end.shutdown()
    assert policy.module.weight.item() == 9.0  # in memory of its own
    policy.module.weight.fill_(4.0)


def test_an_inference_server_tags_answers_with_the_versions_of_the_channel():
    scheme, trained = ChannelWeightSyncScheme(), make_policy(1.0)
    scheme.init_on_sender(model_id="policy", model=trained)
    scheme.connect()
    with pytest.raises(RuntimeError, match=r"weight_sync: .* pass copy.copy\(scheme\)"):
        scheme.init_on_receiver(model_id="policy", model=make_policy(0.0))
    with InferenceServer(make_policy(0.0), weight_sync=copy.copy(scheme)) as server:
        ask = server.client()
        for version in (1, 4, 9):
            if version > 1:
                scheme.send(make_policy(float(version)), version=version)
            # The first answer may be of a version that was loaded before.
            answers = [ask(TensorDict({"observation": torch.ones(1)})) for _ in range(2)]
            assert all(x["policy_version"].item() == x["action"].item() for x in answers)
            assert answers[-1]["policy_version"].item() == version == server.policy_version
        server.update_model(lambda model: model.module.weight.fill_(0.0))  # in memory of its own
    scheme.shutdown()


def maps() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:")


def test_nothing_is_left_after_a_shutdown():
    before = maps()
    files = len(list(Path("/proc/self/fd").iterdir()))
    threads = threading.active_count()
    scheme = ChannelWeightSyncScheme()
    with collecting(Collector, scheme, canary_policy()) as (collector, iterator):
        next(iterator)
    scheme.shutdown()
    assert maps() == before
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert threading.active_count() == threads
    with pytest.raises(RuntimeError, match="nothing after shutdown"):
        collector.update_policy_weights_()
    with collecting(Collector, scheme, canary_policy()) as (collector, iterator):  # another one
        assert next(iterator)["policy_version"].unique().tolist() == [1]
        collector.update_policy_weights_(weights_of(2.0))
        batch = next(iterator)
        assert batch["policy_version"].eq(2).all() and batch["low"].eq(2.0).all()


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.parametrize("path", ["", "actor."])
def test_a_peft_model_is_sent_merged_or_as_it_is(strategy, path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), config)
    scheme = ChannelWeightSyncScheme(strategy)
    whole_model = torch.nn.ModuleDict({"actor": model}) if path else model
    scheme.init_on_sender(model_id="policy", model=whole_model)
    scheme.connect()
    with scheme.channel.handle.open() as reader, reader.lease() as lease:
        sent = dict(zip((e.name for e in reader.layout.stored), lease.views, strict=True))
        whole = model.state_dict()
        if strategy == "state_dict":
            whole = copy.deepcopy(model).merge_and_unload().state_dict()
        assert sent.keys() == {path + name for name in whole}
        assert all(torch.equal(sent[path + name], whole[name]) for name in whole)
    scheme.shutdown()


def test_what_a_channel_cannot_do_is_refused():
    with pytest.raises(ValueError, match="timeout: expected a finite number of seconds"):
        ChannelWeightSyncScheme(timeout=-1)
    scheme = ChannelWeightSyncScheme()
    with pytest.raises(ValueError, match="expected 'policy' to name a model"):
        scheme.init_on_sender(params_map={})
    with pytest.raises(ValueError, match=r"call scheme\.init_on_sender"):
        MultiSyncCollector(
            [Ones], policy_factory=make_policy, weight_sync_schemes={"policy": scheme}, **FRAMES
        )
    uuids, compiled = PolicyVersion(version_type="uuid"), make_policy()
    compiled.compile(backend="eager")
    for policy, tracker, message in (
        (make_policy(), uuids, "version_type='int'"),
        (compiled, True, r"got one whose compile\(\) was called"),
    ):
        with (
            pytest.raises((TypeError, ValueError), match=message),
            collecting(Collector, ChannelWeightSyncScheme(), policy, track_policy_version=tracker),
        ):
            pass
    with collecting(Collector, ChannelWeightSyncScheme(), make_policy()) as (collector, _):
        with pytest.raises(ValueError, match="worker_ids: expected None or all"):
            collector.update_policy_weights_(make_policy(), worker_ids=[1])
        with pytest.raises(ValueError, match="differences from the expected layout"):
            collector.update_policy_weights_({"other": torch.ones(1)})
        with pytest.raises(TypeError, match=r"weights: expected a module, .* pass the model"):
            collector.update_policy_weights_(3)
        scheme = collector._weight_sync_schemes["policy"]
        assert scheme.version == 1


@pytest.mark.parametrize("second", [Collector, MultiSyncCollector, AsyncCollector])
def test_a_scheme_serves_one_collector(second, monkeypatch):
    scheme, policy = ChannelWeightSyncScheme(), canary_policy()
    monkeypatch.setattr(
        "multiprocessing.process.BaseProcess.start", lambda _: pytest.fail("starts")
    )
    with collecting(Collector, scheme, policy) as (collector, iterator):
        for given in (canary_policy(), policy):
            with (
                pytest.raises(RuntimeError, match=r"expected one without .* of a Collector"),
                collecting(second, scheme, given),
            ):
                pass
        collector.update_policy_weights_(weights_of(2.0))
        assert versions(next(iterator)) == {2}


@pytest.mark.parametrize("connected", [False, True])
def test_a_collector_follows_a_scheme_that_was_initialised_before_it(connected):
    scheme = ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=canary_policy())
    if connected:
        scheme.connect()
    with collecting(Collector, scheme, canary_policy()) as (collector, iterator):
        assert versions(next(iterator)) == {1}
        collector.update_policy_weights_(weights_of(2.0))
        assert versions(next(iterator)) == {2}


def test_torchrl_knows_the_backend_and_what_the_scheme_builds_on():
    assert isinstance(WeightSyncScheme.from_backend("channel", slots=4), ChannelWeightSyncScheme)
    collector = Collector(Ones, make_policy(), track_policy_version=True, **FRAMES)
    assert collector.policy_version_tracker is collector.env.transform
    collector.policy_version_tracker.version = 5
    assert next(iter(collector))["next", "policy_version"].unique().tolist() == [5]
    collector.shutdown()


def test_a_collector_that_is_garbage_is_freed_without_a_warning(caplog):
    collector = Collector(
        Ones, canary_policy(), weight_sync_schemes={"policy": ChannelWeightSyncScheme()}, **FRAMES
    )
    collector.next()
    del collector
    gc.collect()
    assert "expected no tensors" not in caplog.text
