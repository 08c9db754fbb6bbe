"""The channel's weight-sync scheme: torchrl's collectors compute each call with one version."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from one_thread import one_thread
from sync_workers import Callable, Canary, canary_policy, scored, weights_of
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.collectors.llm import LLMCollector
from torchrl.collectors.utils import _make_meta_policy
from torchrl.envs.llm.transforms import PolicyVersion
from torchrl.modules.llm import TransformersWrapper
from torchrl.weight_update import WeightSyncScheme
from weights_workers import Ones, make_policy

from fusedrl import ChannelWeightSyncScheme
from fusedrl.channel.following import version_of

__all__ = ["one_thread"]

pytestmark = pytest.mark.filterwarnings("ignore")

FRAMES = {"frames_per_batch": 24, "total_frames": -1}


@pytest.fixture
def forked():
    """Workers are forked: they start in a tenth of the time."""
    before = torch.multiprocessing.get_start_method(allow_none=True)
    torch.multiprocessing.set_start_method("fork", force=True)
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


def check_every_frame(collector, iterator, batches: int) -> None:
    assert versions(next(iterator)) == {1}
    with training(collector):
        seen = set().union(*(versions(next(iterator)) for _ in range(batches)))
    assert len(seen) > 5
    last = collector._weight_sync_schemes["policy"].version
    assert collector.policy_version == last  # one update, one version
    newest(collector, iterator, last)


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_frames_of_a_collector_in_the_trainers_process_have_one_version_each(mode):
    policy = canary_policy()
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    scheme = ChannelWeightSyncScheme(mode=mode)
    with collecting(Collector, scheme, policy) as (collector, iterator):
        check_every_frame(collector, iterator, 6)
        assert version_of(collector.policy) == scheme.version
        assert version_of(policy) is None
    # The trainer's own model is neither changed nor frozen.
    assert all(x.requires_grad for x in policy.parameters())
    assert all(torch.equal(before[name], x) for name, x in policy.state_dict().items())
    assert collector.policy is policy
    assert isinstance(collector.policy_version_tracker, PolicyVersion)
    assert policy._compiled_call_impl is None and not policy._load_state_dict_pre_hooks


@pytest.mark.parametrize("make", [MultiSyncCollector, MultiAsyncCollector, AsyncCollector])
def test_frames_of_worker_processes_have_one_version_each(make, forked):
    with collecting(make, ChannelWeightSyncScheme(), canary_policy()) as (collector, iterator):
        check_every_frame(collector, iterator, 6)


def test_what_workers_save_is_one_version_and_what_they_restore_stays_out_of_the_channel(forked):
    scheme = ChannelWeightSyncScheme()
    with collecting(MultiSyncCollector, scheme, canary_policy()) as (collector, iterator):
        next(iterator)
        collector.update_policy_weights_(weights_of(2.0))
        saved = collector.state_dict()
        workers = [w["policy_state_dict"] for k, w in saved.items() if k.startswith("worker")]
        assert len(workers) == 2
        for state in workers:
            assert {float(n) for x in state.values() for n in x} == {2.0}
            for x in state.values():
                x.fill_(9.0)
        collector.load_state_dict(saved)
        newest(collector, iterator, 2)
        for version in range(3, 9):  # all slots
            collector.update_policy_weights_(weights_of(float(version)))
            newest(collector, iterator, version)


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


def test_a_killed_worker_is_logged_once_and_holds_nobody_up(caplog, forked):
    scheme = ChannelWeightSyncScheme()
    with collecting(MultiSyncCollector, scheme, canary_policy()) as (collector, iterator):
        next(iterator)
        killed = collector.procs[1]
        killed.kill()
        killed.join(10)
        collector.update_policy_weights_(weights_of(2.0))
        assert f"got dead: pid {killed.pid}; the others get version 2" in caplog.text
        caplog.clear()
        for version in range(3, 9):  # all slots
            collector.update_policy_weights_(weights_of(float(version)))
        assert caplog.text == ""


def test_a_waiting_update_names_the_worker_that_is_stopped_or_dead(forked):
    scheme = ChannelWeightSyncScheme(wait=True, timeout=0.3)
    slow = canary_policy(pause=0.1)
    with collecting(AsyncCollector, scheme, slow) as (collector, iterator):
        collector.update_policy_weights_(weights_of(2.0))  # an idle worker computes with nothing
        next(iterator)
        pid = collector.procs[0].pid
        for _ in range(50):
            os.kill(pid, signal.SIGSTOP)
            if scheme.channel.readers()[0].leased:
                break
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.02)
        with pytest.raises(TimeoutError, match=rf"than 3 after 0.3 s, got pid {pid} computes with"):
            collector.update_policy_weights_(weights_of(3.0))
        # Slots are left for those that run, and none for those that do not end.
        scheme.wait = False
        os.kill(pid, signal.SIGCONT)
        collector.update_policy_weights_(weights_of(4.0))

        os.kill(pid, signal.SIGKILL)
        collector.procs[0].join(10)
        with pytest.raises(RuntimeError, match=rf"expected living workers, got dead: pid {pid}"):
            collector.update_policy_weights_(weights_of(5.0))


def test_policies_that_workers_make_follow_a_model_that_the_trainer_names(forked):
    scheme = ChannelWeightSyncScheme(mode="copy")
    trained = canary_policy(1.0)
    scheme.init_on_sender(model_id="policy", model=trained)
    with collecting(MultiSyncCollector, scheme, policy_factory=Callable, trust_policy=True) as (
        collector,
        iterator,
    ):
        newest(collector, iterator, 1)
        collector.update_policy_weights_(canary_policy(2.0))
        newest(collector, iterator, 2)


def test_a_policys_part_and_a_transforms_model_have_schemes_of_their_own(forked):
    part, model = "policy.module", "env.transform[0].model"
    schemes = {part: ChannelWeightSyncScheme(), model: ChannelWeightSyncScheme()}
    for name, scheme in schemes.items():
        scheme.init_on_sender(model_id=name, model=Canary(1.0))
    with collecting(MultiSyncCollector, schemes, env=scored, policy_factory=canary_policy) as (
        collector,
        iterator,
    ):
        newest(collector, iterator, 1)
        collector.update_policy_weights_(weights_dict={part: Canary(2.0), model: Canary(2.0)})
        collector.update_policy_weights_(Canary(3.0), model_id=model)
        newest(collector, iterator, 2)
        batch = next(iterator)
        assert {*batch["next", "model_low"].flatten().tolist()} == {3.0}
        assert {*batch["next", "model_high"].flatten().tolist()} == {3.0}


def test_a_transforms_model_follows_in_the_trainers_process():
    name = "env.transform[0].model"
    scheme, env = ChannelWeightSyncScheme(), scored()
    transform, model = env.transform, env.transform.model
    with collecting(Collector, scheme, canary_policy(), env, name) as (collector, iterator):
        collector.update_policy_weights_(Canary(5.0), model_id=name)
        assert {*next(iterator)["next", "model_low"].flatten().tolist()} == {5.0}
        assert transform.model is not model
    assert transform.model is model and model.first.requires_grad
    for name, message in (
        ("env.transform[0]", "a path that ends with an attribute"),
        ("env.transform", "a module that is called, got the transform"),
    ):
        schemes, env = {name: ChannelWeightSyncScheme()}, scored()
        transform, model = env.transform, env.transform.model
        tracks = name.endswith("]")  # a transform more
        with (
            pytest.raises(ValueError, match=message),
            collecting(Collector, schemes, canary_policy(), env, track_policy_version=tracks),
        ):
            pass
        assert transform.model is model and model._compiled_call_impl is None
        assert tracks or env.transform is transform


class Tied(nn.Module):
    """Two names of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        self.b.weight = self.a.weight

    def forward(self, observation):
        return self.b(self.a(observation))


def test_tied_weights_stay_tied_in_workers(forked):
    policy = TensorDictModule(Tied(), in_keys=["observation"], out_keys=["action"])
    scheme = ChannelWeightSyncScheme(mode="copy")
    with collecting(AsyncCollector, scheme, policy) as (collector, iterator):
        next(iterator)
        assert scheme.channel.layout.stored[0].name == "module.a.weight"
        assert len(scheme.channel.layout.stored) == 1
        with torch.no_grad():
            policy.module.a.weight.fill_(3.0)
        collector.update_policy_weights_()
        for _ in range(4):
            actions = next(iterator)["action"].flatten().tolist()
        assert actions == [9.0] * len(actions)


def test_a_language_model_that_travels_on_meta_arrives_whole():
    transformers, tokenizers = map(pytest.importorskip, ("transformers", "tokenizers"))
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), pad_token="-", eos_token="."
    )
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes, **heads)).eval()
    policy = TransformersWrapper(model, input_mode="tokens", tokenizer=tokenizer, generate=False)
    scheme = ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=policy)
    scheme.connect()
    with _make_meta_policy(policy):  # as torchrl sends it
        sent = pickle.loads(pickle.dumps(policy))
    worker = pickle.loads(pickle.dumps(scheme))
    worker.init_on_receiver(model_id="policy", model=sent, worker_idx=0)
    worker.connect(worker_idx=0)
    tokens = torch.arange(8)[None]
    arrived = sent.model.state_dict()
    assert all(torch.equal(arrived[name], x) for name, x in model.state_dict().items())
    torch.testing.assert_close(sent.model(tokens).logits, model(tokens).logits)
    for end in (worker, scheme):
        end.shutdown()


def test_an_update_between_the_policy_call_and_the_step_leaves_the_tag():
    scheme = ChannelWeightSyncScheme()
    env = Ones()
    step = env._step
    with collecting(Collector, scheme, canary_policy(), env) as (collector, iterator):

        def update_first(tensordict):
            collector.update_policy_weights_(weights_of(scheme.version + 1.0))
            return step(tensordict)

        env._step = update_first
        batch = next(iterator)
        first = int(batch["low"][0])
        assert sorted(versions(batch)) == list(range(first, first + len(batch)))


def test_a_collector_that_compiles_its_policy_follows():
    compiled = {"backend": "eager", "fullgraph": True}
    scheme, policy = ChannelWeightSyncScheme(), make_policy(1.0)
    with collecting(Collector, scheme, policy, compile_policy=compiled) as (collector, iterator):
        check_that_updates_count(collector, iterator)


def test_a_policy_that_is_compiled_already_follows():
    policy, scheme = make_policy(1.0), ChannelWeightSyncScheme()
    policy.compile(backend="eager")
    with collecting(Collector, scheme, policy) as (collector, iterator):
        check_that_updates_count(collector, iterator)
        for other in (
            copy.deepcopy(collector.policy),
            pickle.loads(pickle.dumps(collector.policy)),
        ):
            other.module.weight.fill_(9.0)
            assert other(TensorDict({"observation": torch.ones(1)}))["action"].item() == 9.0
    assert policy(TensorDict({"observation": torch.ones(1)}))["action"].item() == 1.0


def test_a_collector_that_takes_no_schemes_follows_one_that_is_given_the_collector():
    collector = LLMCollector(
        Ones(), policy=canary_policy(), dialog_turns_per_batch=4, track_policy_version=True
    )
    scheme, iterator = ChannelWeightSyncScheme(), iter(collector)
    scheme.init_on_sender(model_id="policy", context=collector)
    scheme.connect()
    assert versions(next(iterator)) == {1}
    scheme.send(weights_of(2.0))
    assert versions(next(iterator)) == {2}
    scheme.shutdown()
    collector.shutdown()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_forward_that_raises_keeps_no_version(error):
    class Failing(Canary):
        def forward(self, observation):
            if self.pause < 0:
                raise error("on purpose")
            return super().forward(observation)

    policy = TensorDictModule(Failing(), ["observation"], ["action", "low", "high"])
    scheme = ChannelWeightSyncScheme()
    with collecting(Collector, scheme, policy) as (collector, iterator):
        collector.policy.module.pause = -1
        with pytest.raises(error, match="on purpose"):
            collector.policy(TensorDict({"observation": torch.ones(1)}))
        assert scheme.channel.readers()[0].leased == ()
        collector.policy.module.pause = 0.0
        collector.update_policy_weights_(weights_of(2.0))
        assert versions(next(iterator)) == {2}


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
    assert ours.receive(timeout=1)["module", "weight"].item() == 2.0
    assert ours.receive(timeout=0.01) is None
    assert scheme.send(make_policy(9.0), version=9) == 9 == ours.version
    for end in (ours, ours, scheme, scheme):
        end.shutdown()
    assert policy.module.weight.item() == 9.0  # in memory of its own
    policy.module.weight.fill_(4.0)


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


def test_a_collector_that_is_dropped_frees_its_channel():
    scheme, before = ChannelWeightSyncScheme(), maps()
    collector = Collector(Ones, canary_policy(), weight_sync_schemes={"policy": scheme}, **FRAMES)
    handle = scheme.channel.handle
    handle.open().close()
    assert maps() > before
    del collector
    assert maps() == before
    assert scheme.version is None
    with pytest.raises(RuntimeError, match="expected a running publisher"):
        handle.open()


def test_what_a_channel_cannot_do_is_refused():
    for arguments, message in (
        ({"timeout": 0}, "timeout: expected a positive"),
        ({"mode": "share"}, "mode: expected 'alias', 'copy'"),
    ):
        with pytest.raises(ValueError, match=message):
            ChannelWeightSyncScheme(**arguments)
    scheme = ChannelWeightSyncScheme()
    with pytest.raises(ValueError, match="params_map, device_map_fn: expected None"):
        scheme.init_on_sender(params_map={})
    with pytest.raises(ValueError, match=r"call scheme\.init_on_sender"):
        MultiSyncCollector(
            [Ones], policy_factory=make_policy, weight_sync_schemes={"policy": scheme}, **FRAMES
        )
    uuids = PolicyVersion(version_type="uuid")
    with (
        pytest.raises(ValueError, match="version_type='int'"),
        collecting(Collector, scheme, make_policy(), track_policy_version=uuids),
    ):
        pass
    with collecting(Collector, ChannelWeightSyncScheme(), make_policy()) as (collector, _):
        with pytest.raises(ValueError, match="worker_ids: expected None or all"):
            collector.update_policy_weights_(make_policy(), worker_ids=[1])
        with pytest.raises(ValueError, match="differences from the channel's layout"):
            collector.update_policy_weights_({"other": torch.ones(1)})
        scheme = collector._weight_sync_schemes["policy"]
        assert scheme.version == 1
        with pytest.raises(RuntimeError, match="weights: expected them through the channel"):
            scheme.apply_weights(weights_of(1.0))


def test_a_model_that_cannot_be_copied_is_refused():
    policy = make_policy()
    policy.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"expected one that copy\.deepcopy takes"):
        Collector(Ones, policy, weight_sync_schemes={"policy": ChannelWeightSyncScheme()}, **FRAMES)


def test_torchrl_knows_the_backend_and_what_the_scheme_builds_on():
    assert isinstance(WeightSyncScheme.from_backend("channel", slots=4), ChannelWeightSyncScheme)
    collector = Collector(Ones, make_policy(), track_policy_version=True, **FRAMES)
    # Private, and used: where a collector keeps its policy, its tag, and the data of a step.
    assert collector._wrapped_policy is collector._wrapped_policy_uncompiled
    assert hasattr(collector, "_wrapped_policy_maybe_compiled")
    assert collector.policy_version_tracker is collector.env.transform
    assert collector._carrier.get("policy_version").dtype == torch.int64
    assert {"compiled_policy", "cudagraphed_policy"} <= vars(collector).keys()
    assert isinstance(WeightSyncScheme.context, property)
    collector.policy_version_tracker.version = 5
    assert next(iter(collector))["next", "policy_version"].unique().tolist() == [5]
    collector.shutdown()
