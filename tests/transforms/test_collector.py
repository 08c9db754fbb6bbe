"""``RetrieveKL`` inside torchrl's collector, with a policy that really generates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import StepCounter
from torchrl.envs.llm.transforms import KLRewardTransform as TorchrlKLRewardTransform
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import MCAdvantage

import fusedrl
from fusedrl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb

from .dialogs import assert_rows_equal, rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")
COEFF = 0.1


@pytest.fixture
def collect(generating_policy) -> Iterator[Callable[..., LLMCollector]]:
    """A collector over an environment, two batches of four turns; shut down after the test."""
    running = []

    def collect(env: Any, **options: Any) -> LLMCollector:
        given = {"policy": generating_policy, "dialog_turns_per_batch": 4, "total_dialog_turns": 8}
        running.append(LLMCollector(env, **(given | options)))
        return running[-1]

    yield collect
    for collector in running:
        collector.shutdown()


@pytest.fixture
def transform(reference) -> RetrieveKL:
    return RetrieveKL("from_collector", reference(), coeff=COEFF)


def check(batch: TensorDictBase, turns: int) -> None:
    """So many turns, each with the KL of two models that differ, and a reward less by it."""
    data = batch.reshape(-1)["next"]
    assert data.shape == (turns,)
    kl = rows(data, "kl_penalty")
    assert all(row.abs().max() > 0.1 for row in kl)
    pairs = zip(rows(data, GEN), rows(data, REF), strict=True)
    assert_rows_equal(kl, [gen - ref for gen, ref in pairs])
    assert_rows_equal(rows(data, "reward"), [1 - COEFF * row.unsqueeze(-1) for row in kl])


@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("flatten", [False, True])
def test_batches_of_turns(transform, chat_env, collect, turns, flatten):
    collector = collect(chat_env(transform), dialog_turns_per_batch=turns, flatten_data=flatten)
    batches = list(collector)
    assert len(batches) == 8 // turns
    for batch in batches:
        assert batch.shape == ((turns,) if flatten else (2, turns // 2))
        check(batch, turns)


def test_new_weights_are_seen_at_once(transform, chat_env, collect, tokenizer, policy_model, wrap):
    """The scorer shares the parameters of the policy, which a trainer writes in place."""
    model = copy.deepcopy(policy_model)
    policy = TransformersWrapper(
        model, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 6, "do_sample": True}
    )
    for batch in collect(chat_env(transform), policy=policy):
        data = batch.reshape(-1)
        scored = RetrieveLogProb(wrap(model), log_probs_full_key=GEN)(data.select("history"))
        assert_rows_equal(rows(data["next"], GEN), rows(scored, GEN))
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)


class FullLogProbs(torch.nn.Module):
    """A policy that writes log-probs of the prompt too, as torchrl's transform needs them."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = policy
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        td = self.policy(td)
        for sample in td.unbind(0):
            answer, tokens = sample["log_probs"].response, sample["tokens"].full
            padded = torch.nn.functional.pad(answer, (len(tokens) - len(answer), 0))
            sample.set(GEN, padded)
        return td


@pytest.mark.parametrize("steps", [1, 2])
def test_turns_have_the_keys_of_torchrl(wrap, reference_model, chat_env, generating_policy, steps):
    """torchrl's first turns of all have no ``kl_penalty`` at the root, where later ones have it."""
    keys: list[list[set[str]]] = []
    for collector, transform in (
        (fusedrl.LLMCollector, fusedrl.KLRewardTransform),
        (LLMCollector, TorchrlKLRewardTransform),
    ):
        env = chat_env(StepCounter(steps), transform(wrap(reference_model, input_mode="tokens")))
        policy = FullLogProbs(generating_policy)
        options = {"dialog_turns_per_batch": 4, "total_dialog_turns": 8}
        batches = collector(env, policy=policy, track_policy_version=True, **options)
        turns = [turn for batch in batches for turn in batch.reshape(-1).unbind(0)]
        keys.append([set(map(str, turn.keys(True, True))) for turn in turns])
    ours, theirs = keys
    added = {str(("collector", "traj_ids"))}
    assert len(ours) == len(theirs) == 8
    for mine, other in zip(ours, theirs, strict=True):
        assert mine - added == other | {"kl_penalty"}


TRANSFORMS = {
    "KLRewardTransform": lambda own, ref: [KLRewardTransform(ref(input_mode="tokens"))],
    "RetrieveKL": lambda own, ref: [RetrieveKL(own(), ref())],
    "of the collector": lambda own, ref: [RetrieveKL("from_collector", ref())],
    "in parts": lambda own, ref: [
        RetrieveLogProb(own(), log_probs_full_key=GEN),
        RetrieveLogProb(ref()),
        KLComputation(coeff=0.1),
    ],
}


@pytest.mark.parametrize("rows_of_env", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_groups_of_first_and_later_turns(
    name, rows_of_env, policy, reference, chat_env, generating_policy
):
    """``MCAdvantage`` concatenates the turns of a group, so that all need the same keys."""
    env = chat_env(StepCounter(1), *TRANSFORMS[name](policy, reference), rows=rows_of_env)
    buffer = ReplayBuffer(
        storage=LazyStackStorage(20), transform=MCAdvantage(grpo_size=2), batch_size=2
    )
    for nothing in fusedrl.LLMCollector(
        env,
        policy=generating_policy,
        replay_buffer=buffer,
        dialog_turns_per_batch=4,
        total_dialog_turns=4,
    ):
        assert nothing is None
    stored = [buffer.storage[i] for i in range(4)]
    assert len({str(sorted(map(str, turn.keys(True, True)))) for turn in stored}) == 1
    assert all(turn["advantage"].isfinite().all() for turn in stored)


class TestGetNewVersion:
    """The policy is asked for a version that scores; what it answers is what scores."""

    @pytest.fixture
    def asked(self, generating_policy, monkeypatch) -> list[dict[str, Any]]:
        asked: list[dict[str, Any]] = []
        original = generating_policy.get_new_version

        def recording(**options: Any) -> Any:
            asked.append(options)
            return original(**options)

        monkeypatch.setattr(generating_policy, "get_new_version", recording)
        return asked

    @pytest.mark.parametrize("pad_output", [False, True])
    def test_is_asked_once_for_what_fits_the_reference(
        self, reference, chat_env, collect, asked, pad_output
    ):
        env = chat_env(RetrieveKL("from_collector", reference(pad_output=pad_output), coeff=COEFF))
        collector = collect(env)
        assert asked == [], "not before the first step"
        for batch in collector:
            check(batch, 4)
        (options,) = asked
        expected = {
            "generate": False,
            "return_log_probs": True,
            "pad_output": pad_output,
            "input_mode": "history",
            "log_probs_key": "log_probs",
        }
        assert {key: options[key] for key in expected} == expected
