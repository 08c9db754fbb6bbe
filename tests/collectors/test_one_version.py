"""From the policy's call to the last transform of the same step: one version, that of the tag."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from one_version import ROWS, TURNS, check_versions, generating, model_of, scored_chats
from torchrl.collectors import Collector
from torchrl.envs import AsyncEnvPool

from fusedrl import AsyncCollector, ChannelWeightSyncScheme, LLMCollector, WeightChannel

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

    check_versions(collector, tokenizer, publish)


@pytest.mark.parametrize("of", [LLMCollector, None], ids=["dialogs", "frames"])
@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("way", ["scheme", "channel"])
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

    check_versions(collector, tokenizer, publish)


@pytest.mark.parametrize("mode", ["alias", "copy"])
@pytest.mark.parametrize("turns", TURNS_AND_MORE)
def test_a_pool_of_threads(tokenizer, channel, mode, turns):
    """While an environment scores, the policy answers others with newer weights."""
    pool = AsyncEnvPool([partial(scored_chats, tokenizer, 1)] * 3, stack="lazy")
    collector = LLMCollector(
        pool,
        policy=generating(tokenizer, model_of(tokenizer, 0)),
        yield_completed_trajectories=True,
        dialog_turns_per_batch=2,
        channel=channel.handle,
        channel_mode=mode,
        track_policy_version=True,
    )
    check_versions(collector, tokenizer, channel.publish, turns=turns)
