"""LLMCollector with weights out of a channel: what the policy computes with is what is stamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import channel_collector as workers
import pytest
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting
from prepared import processes
from torchrl.envs import AsyncEnvPool, TransformedEnv

from fusedrl import ChannelWeightSyncScheme, LLMCollector, VanillaLocalWeightUpdater, WeightChannel


def publish(channel: WeightChannel, version: int) -> None:
    """Weights that are their version."""
    channel.publish(policy_of(Says(version)), version)


@pytest.fixture
def channel() -> Iterator[WeightChannel]:
    with WeightChannel.create(policy_of(Says()), timeout=10.0) as channel:
        yield channel


@pytest.fixture
def collect(channel, collect) -> Callable[..., LLMCollector]:
    """A collector of a turn of two rows a batch that follows the channel."""
    sizes = {"dialog_turns_per_batch": 2, "total_dialog_turns": -1}
    follows = {"channel": channel.handle, "track_policy_version": True}

    def following(env: Any = None, **options: Any) -> LLMCollector:
        return collect(env, **({"policy": policy_of(Says()), **sizes, **follows} | options))

    return following


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_each_call_has_the_newest_version(channel, collect, mode):
    collector = collect(channel_mode=mode)
    assert of(collector.next()) == [0, 0]
    for version in (1, 2, 7):
        publish(channel, version)
        assert of(collector.next()) == of(collector.next()) == [version] * 2
    assert collector.policy_version == 7
    assert [reader.applied for reader in channel.readers()] == [7]


@pytest.mark.parametrize("connects", [False, True], ids=["new", "connected"])
def test_a_scheme_of_the_trainers_own_model(collect, connects):
    trained, scheme = policy_of(Says(1)), ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=trained)
    if connects:
        scheme.connect()
    collector = collect(channel=None, weight_sync_schemes={"policy": scheme})
    assert of(collector.next()) == [1, 1]
    collector.update_policy_weights_(policy_of(Says(2)))
    assert of(collector.next()) == [2, 2]
    trained.load_state_dict(policy_of(Says(3)).state_dict())
    assert of(collector.next()) == [2, 2]
    collector.update_policy_weights_()
    assert of(collector.next()) == [3, 3]


def test_weights_past_the_channel_are_refused(channel, collect):
    collector = collect()
    collector.weight_updater = updater = VanillaLocalWeightUpdater(None, None)
    for update in (collector.update_policy_weights_, collector.receive_weights, updater):
        with pytest.raises(RuntimeError, match="channel: expected weights through it"):
            update(policy_of(Says(5)))
    assert of(collector.next()) == [0, 0]


def test_a_version_published_while_the_policy_runs_is_the_next_turns(channel, collect):
    collector = collect(dialog_turns_per_batch=6)
    collector.policy.register_forward_hook(lambda *_: publish(channel, (channel.version or 0) + 1))
    assert of(collector.next()) == [0, 1, 2] * 2


def test_a_pool(channel, collect):
    pool = AsyncEnvPool([lambda n=n: Counting(1, n) for n in (2, 3)], stack="lazy")
    collector = collect(pool, yield_completed_trajectories=True, total_dialog_turns=20)
    got = []
    for batch in collector:
        publish(channel, (channel.version or 0) + 1)
        got += of(batch)
    assert len(got) >= 20 and len(set(got)) > 3


def test_the_model_that_a_wrapper_wraps(collect):
    class Wrapper:
        def __init__(self):
            self.model = Says()

        def __call__(self, turn):
            return turn.set("action", self.model(turn["seen"]))

    with WeightChannel.create(Says()) as channel:
        collector = collect(policy=Wrapper(), channel=channel.handle)
        channel.publish(Says(3), 3)
        assert of(collector.next()) == [3, 3]


def test_a_stored_state_stays_and_its_weights_give_way_to_those_of_the_channel(channel, collect):
    collector = collect()
    publish(channel, 3)
    collector.next()
    state = collector.state_dict()
    for version in (4, 5, 6, 7):
        publish(channel, version)
        collector.next()
    assert state["policy_state_dict"]["module.value"].item() == state["policy_version"] == 3
    collector.load_state_dict(state)
    assert of(collector.next()) == [7, 7] and collector.stats()["frames"] == 4


def test_shutdown_closes_what_it_opened_and_the_policy_stays_usable(channel, collect):
    module = Says()
    publish(channel, 4)
    collector = collect(policy=policy_of(module))
    collector.next()
    collector.shutdown()
    assert channel.readers() == []
    with torch.no_grad():
        assert module.value.add_(1).item() == 5


def test_a_reader_that_is_given_stays_open(channel, collect):
    with channel.handle.open() as reader:
        publish(channel, 4)
        collector = collect(channel=reader)
        assert of(collector.next()) == [4, 4]
        collector.shutdown()
        assert reader.version == 4


@pytest.mark.parametrize("way", ["channel", "scheme"])
@pytest.mark.parametrize("pool", [False, True], ids=["env", "pool"])
def test_another_policy_is_refused_where_weights_have_versions(channel, collect, way, pool):
    publish(channel, 1)
    env = AsyncEnvPool([lambda: Counting(1)] * 2, stack="lazy") if pool else Counting()
    scheme = ChannelWeightSyncScheme()
    by_scheme = {"channel": None, "weight_sync_schemes": {"policy": scheme}}
    collector = collect(env, policy=policy_of(Says(1)), **(by_scheme if way == "scheme" else {}))
    assert {*of(collector.next().reshape(-1))} == {1}
    with pytest.raises(RuntimeError, match="policy: expected the module that follows the channel"):
        collector.policy = policy_of(Says(7))
    collector.policy = collector.policy
    assert {*of(collector.next().reshape(-1))} == {1}
    scheme.shutdown()


def test_staleness_counts_from_what_is_published(channel, collect):
    collector = collect(max_staleness=1, total_dialog_turns=8)

    def publishing(*_):
        if collector.stats()["frames"] == 2:
            publish(channel, 9)

    collector.policy.register_forward_hook(publishing)
    kept = [of(batch) for batch in collector]
    assert kept == [[0, 0], [9, 9], [9, 9]] and collector.stale_turns == 2


@pytest.mark.heavy
def test_a_collector_in_another_process(channel):
    answers = processes.Queue()
    publish(channel, 1)
    process = processes.Process(target=workers.collect_until_two, args=(channel.handle, answers))
    process.start()
    assert answers.get(timeout=120) == 1
    publish(channel, 2)
    while answers.get(timeout=60) != 2:
        pass
    process.join(30)
    assert process.exitcode == 0


def test_weights_of_another_model_are_refused_and_leave_no_reader(collect):
    env = TransformedEnv(Counting())
    env.base_env.is_closed = False
    with WeightChannel.create(torch.nn.Linear(1, 1)) as channel:
        with pytest.raises(ValueError, match="differences from the expected layout"):
            collect(env, channel=channel.handle)
        assert not any(reader.alive for reader in channel.readers())
    assert not env.is_closed and "policy_version" not in env.observation_spec
