"""Collectors of dialogs whose policy is a vLLM engine, with weights out of a channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_policies import (
    PROMPT,
    RESPONSE,
    TOKENS,
    checked,
    dialogs,
    stopping,
    versions,
    wrapped,
)
from tensordict import TensorDict, lazy_stack
from tiny_engines import offline
from torchrl.envs import AsyncEnvPool
from torchrl.modules.llm import vLLMWrapper

from fusedrl import ChannelWeightSyncScheme, LLMCollector, WeightChannel
from fusedrl.vllm import EngineWeights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def weights(folder) -> list[Any]:
    """Models by version; an engine starts with the first."""
    return versions(folder, 9)


@pytest.fixture(scope="module")
def running(folder, weights) -> Iterator[Any]:
    with offline(folder) as engine:
        yield engine


@pytest.fixture
def engine(running, weights) -> Any:
    """It has the weights that it was started with, under the number that a test before gave it."""
    with WeightChannel.create(weights[0]) as channel:
        given = EngineWeights(channel, running)
        given.update()
    return running


@pytest.fixture
def channel(weights) -> Iterator[WeightChannel]:
    with WeightChannel.create(weights[0], timeout=10.0) as channel:
        yield channel


@pytest.fixture
def collect(folder, engine, channel) -> Iterator[Callable[..., LLMCollector]]:
    made = []

    def collect(env: Any = None, **options: Any) -> LLMCollector:
        given: dict[str, Any] = {"dialog_turns_per_batch": 4, "track_policy_version": True}
        if "weight_sync_schemes" not in options:
            given["channel"] = channel.handle
        if "policy" not in options:
            given["policy"] = wrapped(engine)
        env = dialogs(folder) if env is None else env
        made.append(LLMCollector(env, **(given | options)))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown()


def prompts(*lengths: int) -> Any:
    return lazy_stack([TensorDict({PROMPT: torch.arange(length) % 200 + 5}) for length in lengths])


def test_each_turn_has_the_newest_version(weights, channel, collect):
    collector = collect()
    assert checked(collector.next(), weights) == [0] * 4
    for version in (1, 2, 5):
        channel.publish(weights[version], version)
        assert collector.policy_version == version
        batch = collector.next()
        assert checked(batch, weights) == [version] * 4
    assert collector.policy_version_tracker.span(batch) == (5, 5)
    channel.publish(weights[6], 6)
    collector.shutdown()
    assert collector.policy_version == 5  # that it had last


def test_a_version_published_while_the_engine_generates_is_the_next_turns(
    weights, channel, collect
):
    collector = collect(dialog_turns_per_batch=8)

    def publish(*_: Any) -> None:
        version = (channel.version or 0) + 1
        channel.publish(weights[version], version)

    collector.policy.register_forward_hook(publish)
    assert checked(collector.next(), weights) == [0, 1, 2, 3] * 2


def test_an_update_past_the_collector_is_not_taken_for_its_version(
    weights, channel, collect, engine
):
    collector = collect()
    channel.publish(weights[1], 1)
    assert checked(collector.next(), weights) == [1] * 4
    for version in (1, 7):
        with WeightChannel.create(weights[2]) as other:
            given = EngineWeights(other, engine)
            given.update(weights[2], version)
        assert checked(collector.next(), weights) == [1] * 4


@pytest.mark.parametrize("is_first", [False, True])
def test_what_another_update_has_loaded_of_the_channel_is_the_turns(
    weights, channel, collect, engine, is_first
):
    collector = None if is_first else collect()
    given = EngineWeights(channel, engine)
    given.update(weights[1], 1)
    collector = collector or collect()
    assert checked(collector.next(), weights) == [1] * 4
    assert collector.policy_version_tracker.version == 1


def test_an_interrupted_update_is_the_version_of_the_next_turn(
    weights, channel, collect, engine, monkeypatch
):
    named, name = [], engine.update_weight_version

    def interrupted(label: str) -> None:
        name(label)
        named.append(label)
        if named.count("1") == 1 and label == "1":
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "update_weight_version", interrupted)
    collector = collect()
    assert checked(collector.next(), weights) == [0] * 4
    channel.publish(weights[1], 1)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    assert checked(collector.next(), weights) == [1] * 4


def test_a_pool(folder, weights, channel, collect):
    pool = AsyncEnvPool([partial(dialogs, folder, rows=1)] * 2, stack="lazy")
    collector = collect(pool, yield_completed_trajectories=True, total_dialog_turns=6)
    versions = []
    for batch in collector:
        versions += checked(batch, weights)
        if (newest := channel.version or 0) < 8:
            channel.publish(weights[newest + 1], newest + 1)
    assert len(versions) >= 6 and len(set(versions)) > 1


def test_ragged_responses(weights, channel, collect, engine):
    """A token ends a dialog's turn here and there, as the other columns of torchrl have it."""
    collector = collect(policy=stopping(wrapped(engine)))
    channel.publish(weights[1], 1)
    turns = collector.next().reshape(-1)
    lengths = [len(row) for row in turns.get(RESPONSE, as_list=True)]
    assert len(set(lengths)) > 1
    for part in (turns, turns["next"]):
        rows = part.get(TOKENS, as_list=True)
        assert [row.tolist() for row in rows] == [[1] * length for length in lengths]


@pytest.mark.parametrize("options", [{}, {"batching": True}, {"inplace": False}], ids=str)
def test_the_versions_of_a_call(channel, collect, engine, options):
    policy = wrapped(engine, input_mode="tokens", **options)
    keys = list(policy.out_keys)
    collector = collect(policy=policy)
    out = policy(prompts(4, 9))
    assert [row.tolist() for row in out.get(TOKENS, as_list=True)] == [[0] * 6] * 2
    collector.shutdown()
    assert TOKENS not in policy(prompts(4, 9)) and policy.out_keys == keys
    assert not any(name.startswith(("_generate", "_call_generate")) for name in vars(policy))


def test_padded_versions(channel, collect, engine):
    policy = wrapped(engine, input_mode="tokens", pad_output=True)
    collect(policy=stopping(policy))
    out = policy(TensorDict({PROMPT: torch.tensor([[0, 0, 65, 66], [65, 66, 67, 68]])}, [2]))
    response = out[RESPONSE]
    ends = out["masks", "all_assistant_mask"][:, -response.shape[-1] :]
    assert not ends.all()
    assert out[TOKENS].tolist() == torch.where(ends, 0, -1).tolist()


def test_the_scheme_with_the_trainers_model(weights, collect):
    trained, scheme = weights[1], ChannelWeightSyncScheme()
    scheme.init_on_sender(model_id="policy", model=trained)
    collector = collect(weight_sync_schemes={"policy": scheme})
    assert checked(collector.next(), weights) == [1] * 4
    assert collector.policy_version == scheme.version == 1
    collector.update_policy_weights_(weights[2])
    assert checked(collector.next(), weights) == [2] * 4
    scheme.shutdown()
    assert checked(collector.next(), weights) == [2] * 4  # the engine keeps them


def test_a_dialog_that_outgrows_the_engine(folder, weights, channel, collect):
    collector = collect(dialogs(folder, turns=50), dialog_turns_per_batch=2)
    turns: list[int] = []

    def collect_all() -> None:
        while len(turns) < 100:
            turns.extend(checked(collector.rollout(), weights))

    with pytest.raises(Exception, match="context length is 256"):  # of vLLM
        collect_all()
    assert len(turns) > 2
    collector.reset()
    channel.publish(weights[1], 1)
    assert checked(collector.next(), weights) == [1] * 2


def test_engines_without_the_backend_are_refused(collect, engine, monkeypatch):
    config = engine.llm_engine.vllm_config
    for transfer, got in ((None, "None"), (SimpleNamespace(backend="nccl"), "'nccl'")):
        monkeypatch.setattr(config, "weight_transfer_config", transfer)
        with pytest.raises(
            ValueError, match=rf"engine: expected one with backend='fusedrl', got backend={got};"
        ):
            collect()


def test_weights_of_another_model_are_refused(weights, channel, collect):
    with WeightChannel.create(torch.nn.Linear(2, 1)) as other:
        with pytest.raises(
            ValueError, match=r"channel: expected one that the policy's engine can read"
        ):
            collect(channel=other.handle)
        assert not any(reader.alive for reader in other.readers())
    assert checked(collect().next(), weights) == [0] * 4


def test_one_engine_has_one_channel(weights, collect):
    first = collect()
    with pytest.raises(ValueError, match="shut down the other collector first"):
        collect()
    first.shutdown()
    assert checked(collect().next(), weights) == [0] * 4


def test_torchrls_engines_in_actors_are_refused(collect, engine):
    class Actor:
        def generate(self) -> None: ...

        remote = generate

    policy = vLLMWrapper(Actor(), tokenizer=engine.get_tokenizer())
    with pytest.raises(TypeError, match=r"policy: expected a vLLMWrapper of a vllm\.LLM"):
        collect(policy=policy)
