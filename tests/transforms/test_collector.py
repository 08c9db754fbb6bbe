"""``RetrieveKL`` inside torchrl's collector, with a policy that really generates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer, PolicyVersion
from torchrl.envs.llm.transforms import KLRewardTransform as TorchrlKLRewardTransform
from torchrl.envs.llm.transforms import RetrieveKL as TorchrlRetrieveKL
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm.grpo import MCAdvantage

import fusedrl
from fusedrl import KLComputation, KLRewardTransform, RetrieveKL, RetrieveLogProb

from .conftest import QUESTIONS, OneReward
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


def test_torchrl_cannot(reference, chat_env, collect):
    """It asks for the collector when specs are read, before there is one."""
    with pytest.raises(ValueError, match="collector is not set"):
        collect(chat_env(TorchrlRetrieveKL("from_collector", reference())))


@pytest.mark.parametrize("turns", [2, 4])
@pytest.mark.parametrize("flatten", [False, True])
def test_batches_of_turns(transform, chat_env, collect, turns, flatten):
    collector = collect(chat_env(transform), dialog_turns_per_batch=turns, flatten_data=flatten)
    batches = list(collector)
    assert len(batches) == 8 // turns
    for batch in batches:
        assert batch.shape == ((turns,) if flatten else (2, turns // 2))
        check(batch, turns)


def test_the_log_probs_are_the_policys_own(transform, chat_env, collect, policy):
    for batch in collect(chat_env(transform)):
        data = batch.reshape(-1)
        scored = RetrieveLogProb(policy(), log_probs_full_key=GEN)(data.select("history"))
        assert_rows_equal(rows(data["next"], GEN), rows(scored, GEN))


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


def test_replay_buffer(transform, chat_env, collect):
    buffer = ReplayBuffer(storage=LazyStackStorage(20), batch_size=3)
    for nothing in collect(chat_env(transform), replay_buffer=buffer):
        assert nothing is None
    assert len(buffer) == 8
    check(buffer.sample(), 3)


def test_as_a_transform_of_a_replay_buffer(policy, reference, chat_env, collect):
    """Scored when sampled, by whatever the models are then; torchrl's own transforms write into
    what the buffer stores, so that a reward would be penalised at each sampling."""
    scoring = RetrieveKL(policy(), reference(), add_to_reward=False)
    buffer = ReplayBuffer(storage=LazyStackStorage(20), batch_size=3, transform=scoring)
    for _ in collect(chat_env(), replay_buffer=buffer):
        pass
    assert "kl_penalty" not in buffer.storage[0]["next"]
    for _ in range(2):
        data = buffer.sample()["next"]
        pairs = zip(rows(data, GEN), rows(data, REF), strict=True)
        assert_rows_equal(rows(data, "kl_penalty"), [gen - ref for gen, ref in pairs])
        assert (data["reward"] == 1).all()


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
    added = {str(("collector", "traj_ids")), str(("next", "ref_log_prob"))}
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


@pytest.mark.parametrize("only_last", [False, True])
def test_completed_trajectories(transform, chat_env, collect, only_last):
    env = chat_env(StepCounter(2), transform)
    turns = [
        batch.numel()
        for batch in collect(
            env, yield_completed_trajectories=True, yield_only_last_steps=only_last
        )
        if check(batch, 4) is None
    ]
    assert turns == ([4] if only_last else [4, 4])


def test_factories_of_environment_and_policy(transform, chat_env, collect, generating_policy):
    collector = collect(
        lambda: chat_env(transform), policy=None, policy_factory=lambda: generating_policy
    )
    for batch in collector:
        check(batch, 4)


@pytest.mark.parametrize("tracker", [True, PolicyVersion])
def test_policy_version(transform, chat_env, collect, tracker):
    tracker = tracker if tracker is True else tracker()
    for batch in collect(chat_env(transform), track_policy_version=tracker):
        check(batch, 4)
        assert (batch["next", "policy_version"] == 0).all()


def test_postproc(policy, reference, chat_env, collect):
    """Scored after collection, over the whole batch at once."""
    postproc = RetrieveKL(policy(), reference(), coeff=COEFF)
    for batch in collect(chat_env(), postproc=postproc, flatten_data=True):
        check(batch, 4)


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

    def test_own_keys(self, reference, chat_env, collect, asked):
        options = {
            "gen_log_probs_full_key": ("mine", "full"),
            "ref_log_probs_full_key": ("theirs", "full"),
            "kl_key": "kl",
        }
        env = chat_env(RetrieveKL("from_collector", reference(), **options))
        for batch in collect(env):
            data = batch.reshape(-1)["next"]
            pairs = zip(rows(data, ("mine", "full")), rows(data, ("theirs", "full")), strict=True)
            assert_rows_equal(rows(data, "kl"), [gen - ref for gen, ref in pairs])
        assert asked[0]["log_probs_key"] == "mine"

    def test_the_policy_keeps_its_settings(
        self, transform, chat_env, collect, asked, generating_policy
    ):
        def settings() -> dict[str, Any]:
            values = vars(generating_policy).items()
            return {key: dict(x) if type(x) is dict else x for key, x in values if key[0] != "_"}

        before = settings()
        for _ in collect(chat_env(transform)):
            pass
        assert settings() == before


class TestAsyncEnvPool:
    """Environments of one dialog, each in a thread; torchrl's pool takes no larger ones."""

    @pytest.fixture
    def pool(self, tokenizer) -> Callable[..., AsyncEnvPool]:
        def one_env(transform: RetrieveKL) -> TransformedEnv:
            loader = torch.utils.data.DataLoader(
                [{"query": question} for question in QUESTIONS * 4],
                collate_fn=lambda batch: TensorDict(
                    query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
                ),
            )
            env = TransformedEnv(ChatEnv(batch_size=(1,), tokenizer=tokenizer))
            for part in (DataLoadingPrimer(dataloader=loader), OneReward(), StepCounter(2)):
                env.append_transform(part)
            return env.append_transform(transform)

        def pool(make: Callable[[], RetrieveKL]) -> AsyncEnvPool:
            # One waits for the other: torchrl's collector cannot take a first turn of one dialog
            # and a second turn of another at the same time.
            envs = [lambda: one_env(make())] * 2
            pool = AsyncEnvPool(envs, backend="threading", stack="lazy")
            pool.min_get = 2
            return pool

        return pool

    OPTIONS: ClassVar[dict[str, Any]] = {
        "yield_completed_trajectories": True,
        "dialog_turns_per_batch": 2,
    }

    def test_models_that_are_given(self, policy, reference, pool, collect):
        env = pool(lambda: RetrieveKL(policy(), reference(), coeff=COEFF))
        batches = list(collect(env, **self.OPTIONS))
        assert len(batches) == 4
        for batch in batches:
            check(batch, 2)

    def test_environments_of_a_pool_do_not_know_the_collector(self, reference, pool, collect):
        """torchrl registers a collector with the pool alone; ours says what to do instead."""
        env = pool(lambda: RetrieveKL("from_collector", reference()))
        with pytest.raises(ValueError, match=r"run by a collector.* or pass gen_model"):
            next(iter(collect(env, **self.OPTIONS)))
