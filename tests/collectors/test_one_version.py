"""From the policy's call to the last transform of the same step: one version, that of the tag."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from counting_dialogs import Counting
from one_version import ROWS, TURNS, check_versions, generating, model_of, scored_chats
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import AsyncEnvPool, Transform, TransformedEnv

from fusedrl import (
    AsyncCollector,
    ChannelWeightSyncScheme,
    LLMCollector,
    VanillaLocalWeightUpdater,
    WeightChannel,
)

pytestmark = pytest.mark.heavy

TURNS_AND_MORE = [TURNS, pytest.param(20 * TURNS, marks=pytest.mark.slow)]


@pytest.fixture
def channel(tokenizer) -> Iterator[WeightChannel]:
    with WeightChannel.create(model_of(tokenizer, 0), slots=8, timeout=60) as channel:
        channel.publish(model_of(tokenizer, 1), 1)
        yield channel


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("turns", TURNS_AND_MORE)
def test_llm_collector_with_a_channel(tokenizer, channel, mode, turns):
    collector = LLMCollector(
        scored_chats(tokenizer),
        policy=generating(tokenizer, model_of(tokenizer, 0)),
        dialog_turns_per_batch=4 * ROWS,
        channel=channel.handle,
        channel_mode=mode,
        track_policy_version=True,
    )
    check_versions(collector, tokenizer, channel.publish, turns=turns)


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("of", [LLMCollector, Collector])
def test_the_scheme_in_the_trainers_process(tokenizer, of, mode):
    scheme = ChannelWeightSyncScheme(mode=mode)
    dialogs = {"dialog_turns_per_batch": 4 * ROWS, "total_dialog_turns": -1}
    frames = {"frames_per_batch": 4 * ROWS, "total_frames": -1, "use_buffers": False}
    collector = of(
        scored_chats(tokenizer),
        policy=generating(tokenizer, model_of(tokenizer, 1)),
        weight_sync_schemes={"policy": scheme},
        track_policy_version=True,
        **(dialogs if of is LLMCollector else frames),
    )
    policies = {}

    def publish(module: Any, version: int) -> None:
        policy = policies.setdefault(id(module), generating(tokenizer, module))
        scheme.send(policy, version=version)

    check_versions(collector, tokenizer, publish, by_batch=of is Collector)


# Each pair of a worker's class, a mode and a way is in one of these.
WORKERS = [
    (LLMCollector, "alias", "scheme"),
    (LLMCollector, "copy", "channel"),
    (None, "copy", "scheme"),
    (None, "alias", "channel"),
]


@pytest.mark.parametrize(("of", "mode", "way"), WORKERS)
def test_a_process_of_its_own(tokenizer, channel, forked, of, mode, way):
    scheme = ChannelWeightSyncScheme(mode=mode)
    options: dict[str, Any] = (
        {"weight_sync_schemes": {"policy": scheme}}
        if way == "scheme"
        else {"channel": channel.handle, "channel_mode": mode}
    )
    policy = generating(tokenizer, model_of(tokenizer, 1))
    collector = AsyncCollector(
        partial(scored_chats, tokenizer),
        policy,
        collector_class=of,
        frames_per_batch=4 * ROWS,
        track_policy_version=True,
        **({"use_buffers": False} if of is None else {}),
        **options,
    )
    policies = {}

    def publish(module: Any, version: int) -> None:
        if way == "channel":
            channel.publish(module, version)
            return
        sent = policies.setdefault(id(module), generating(tokenizer, module))
        scheme.send(sent, version=version)

    check_versions(collector, tokenizer, publish, by_batch=of is None)


def test_a_pool_that_scores_with_weights_of_a_channel_is_refused(tokenizer, channel):
    """While an environment scores, the policy would answer others with newer weights."""
    pool = AsyncEnvPool([partial(scored_chats, tokenizer, 1)] * 3, stack="lazy")
    collector = LLMCollector(
        pool,
        policy=generating(tokenizer, model_of(tokenizer, 0)),
        dialog_turns_per_batch=2,
        channel=channel.handle,
        track_policy_version=True,
    )
    with pytest.raises(ValueError, match="env: expected a pool whose environments do not use"):
        collector.next()


class SaysTwice(torch.nn.Module):
    """The action is its one weight, which it reads again, into a sum, after a while."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))
        self.wait = wait

    def forward(self, turn: TensorDictBase) -> TensorDictBase:
        turn.set("action", self.value.long().expand(turn["seen"].shape))
        self.wait()
        return turn.set("again", self.value.long().expand(turn["seen"].shape))


class Scored(Transform):
    """Writes the weight that the collector's policy has while the environment steps."""

    takes_policy = True

    def __init__(self, wait: Callable[[], None], collectors: list[LLMCollector]) -> None:
        super().__init__()
        self.wait, self.collectors = wait, collectors

    def _step(self, tensordict, next_tensordict):
        self.wait()
        with self.collectors[0].scoring():
            policy = self.collectors[0].policy
            before = policy.value.long()
            self.wait()
            said = torch.cat([before, policy.value.long()])
        return next_tensordict.set("said", said.expand(*next_tensordict.shape, 2))


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]


@pytest.mark.parametrize("way", ["update_policy_weights_", "receive_weights", "updater"])
@pytest.mark.parametrize("pool", [False, True], ids=["turns", "pool"])
@pytest.mark.parametrize("seed", SEEDS)
def test_updates_without_a_channel_wait_for_the_turn(pool, way, seed):
    """Whoever updates, in whichever thread, while turns run."""
    draw = random.Random(seed)
    longest = draw.choice([0.0005, 0.002])

    def wait():
        time.sleep(draw.uniform(0, longest))

    collectors: list[LLMCollector] = []
    rows = 1 if pool else draw.randint(1, 3)
    make = partial(
        lambda: TransformedEnv(Counting(rows, draw.randint(1, 4)), Scored(wait, collectors))
    )
    collector = LLMCollector(
        AsyncEnvPool([make] * 3, stack="lazy") if pool else make(),
        policy=SaysTwice(wait),
        dialog_turns_per_batch=6,
        yield_completed_trajectories=pool or draw.random() < 0.5,
        weight_updater=VanillaLocalWeightUpdater(None, None) if way == "updater" else None,
        track_policy_version=True,
    )
    collectors.append(collector)
    update = collector.weight_updater if way == "updater" else getattr(collector, way)
    over, versions, batches = threading.Event(), [0], []

    def publish():
        while not over.is_set():
            versions.append(versions[-1] + 1)
            update(TensorDict(value=torch.full((1,), float(versions[-1]))))
            time.sleep(draw.uniform(0, longest))

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        while len(batches) < 20:
            batches.append(collector.next())
    finally:
        over.set()
        thread.join()
        collector.shutdown()
    tags = ["policy_version", ("next", "policy_version"), "action", "again", ("next", "said")]
    rows_of_batches = [row for batch in batches for row in batch.reshape(-1).unbind(0)]
    said = [{n for tag in tags for n in row[tag].flatten().tolist()} for row in rows_of_batches]
    assert [each for each in said if len(each) > 1] == []
    assert len(set.union(*said)) > 10 and set.union(*said) <= set(versions)
