"""``RetrieveKL``: two models and a penalty in one transform, offline and in an environment."""

from __future__ import annotations

import copy

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, TransformedEnv
from torchrl.envs.llm.transforms import RetrieveKL as TorchrlRetrieveKL
from torchrl.modules.llm import TransformersWrapper

from fusedrl import KLComputation, RetrieveKL, RetrieveLogProb

from .conftest import OneReward
from .dialogs import CHATS, assert_rows_equal, conversations, rows

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")


def expected_kl(policy, reference) -> list[torch.Tensor]:
    """The difference of what the two models say on their own."""
    gen = rows(RetrieveLogProb(policy())(conversations()), ("gen_log_probs", "full"))
    ref = rows(RetrieveLogProb(reference())(conversations()), REF)
    kl = [x - y for x, y in zip(gen, ref, strict=True)]
    assert all(row.abs().max() > 0.1 for row in kl), "the two models must differ"
    return kl


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("with_next", [False, True])
def test_kl_of_two_models(policy, reference, stacked, with_next):
    """torchrl raises on plain tensordicts, whose unpadded log-probs it cannot rename."""
    data = conversations(stacked=stacked, with_next=with_next)
    transform = RetrieveKL(policy(), reference(), coeff=0.1)
    target = data["next"] if with_next else data
    target.set("reward", torch.ones(len(CHATS), 1, 1))
    out = transform(data)
    assert out is data
    assert isinstance(transform, TorchrlRetrieveKL)
    target = out["next"] if with_next else out
    kl = expected_kl(policy, reference)
    assert_rows_equal(rows(target, "kl_penalty"), kl)
    assert_rows_equal(rows(target, "reward"), [1 - 0.1 * row.unsqueeze(-1) for row in kl])


class Halving(RetrieveLogProb):
    """A user's subclass that steps in its own way."""

    def _step(self, tensordict, next_tensordict):
        scored = super()._step(tensordict, next_tensordict)
        halved = [row / 2 for row in rows(scored, self.log_probs_full_key)]
        return scored.set(self.log_probs_full_key, torch.nested.as_nested_tensor(halved))


def test_a_scorer_of_the_users_own_steps_in_its_own_way(policy, reference):
    transform = RetrieveKL(policy(), reference(), add_to_reward=False)
    transform.transforms[1] = Halving(reference(), log_probs_full_key=REF)
    out = transform(conversations(stacked=True))
    whole = rows(RetrieveLogProb(reference())(conversations()), REF)
    assert_rows_equal(rows(out, REF), [row / 2 for row in whole])


def test_nothing_is_written_where_the_second_model_cannot_read(policy, reference):
    data = conversations(stacked=True)
    before = set(map(str, data.keys(True)))
    transform = RetrieveKL(policy(), reference(input_key=("elsewhere", "full")))
    with pytest.raises(ValueError, match="elsewhere"):
        transform(data)
    assert set(map(str, data.keys(True))) == before


def test_nothing_is_written_where_one_sample_lacks_the_reward(policy, reference):
    data = conversations(stacked=True).set("reward", torch.ones(len(CHATS), 1, 1))
    del data.tensordicts[1]["reward"]
    before = [set(map(str, row.keys(True))) for row in data.tensordicts]
    with pytest.raises(ValueError, match=r"'reward' .* sample 1"):
        RetrieveKL(policy(), reference())(data)
    assert [set(map(str, row.keys(True))) for row in data.tensordicts] == before


def test_padded_models_answer_dense(policy, reference):
    data = conversations().set("reward", torch.ones(len(CHATS), 1, 1))
    out = RetrieveKL(policy(pad_output=True), reference(pad_output=True), coeff=0.1)(data)
    kl = expected_kl(policy, reference)
    width = max(map(len, kl))
    padded = [torch.nn.functional.pad(row, (width - len(row), 0)) for row in kl]
    assert out["kl_penalty"].shape == (len(CHATS), width)
    torch.testing.assert_close(out["kl_penalty"], torch.stack(padded), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out["reward"], 1 - 0.1 * out["kl_penalty"].unsqueeze(-1))


def test_is_a_compose_of_the_three_transforms(policy, reference):
    transform = RetrieveKL(policy(), reference(), kl_key="kl")
    assert isinstance(transform, Compose)
    assert [type(t) for t in transform] == [RetrieveLogProb, RetrieveLogProb, KLComputation]
    assert transform[2].out_keys == ["kl", "reward"]


def test_clone_is_its_own_transform_over_the_same_models(policy, reference):
    transform = RetrieveKL(policy(), reference(), add_to_reward=False)
    copied = transform.clone()
    assert type(copied) is RetrieveKL and copied.transforms is not transform.transforms
    assert [t.model for t in copied[:2]] == [t.model for t in transform[:2]]
    assert_rows_equal(rows(copied(conversations()), "kl_penalty"), expected_kl(policy, reference))


def test_works_in_a_compose(policy, reference):
    out = Compose(RetrieveKL(policy(), reference(), add_to_reward=False))(conversations())
    assert_rows_equal(rows(out, "kl_penalty"), expected_kl(policy, reference))


@pytest.mark.parametrize("detach", [False, True])
def test_gradients_reach_the_policy_unless_detached(wrap, reference, policy_model, detach):
    model = copy.deepcopy(policy_model)
    out = RetrieveKL(wrap(model, "gen_log_probs"), reference(), detach=detach)(conversations())
    kl = torch.cat(rows(out, "kl_penalty"))
    assert kl.requires_grad is not detach
    if not detach:
        kl.sum().backward()
        assert model.lm_head.weight.grad.any()


def test_factories(policy, reference):
    transform = RetrieveKL(
        gen_model_factory=policy, ref_model_factory=reference, add_to_reward=False
    )
    kl = rows(transform(conversations()), "kl_penalty")
    assert_rows_equal(kl, expected_kl(policy, reference))


def test_own_keys(policy, reference):
    transform = RetrieveKL(
        policy(),
        reference(),
        gen_log_probs_full_key=("mine", "full"),
        ref_log_probs_full_key=("theirs", "full"),
        kl_key=("info", "kl"),
        add_to_reward=False,
    )
    out = transform(conversations())
    assert_rows_equal(rows(out, ("info", "kl")), expected_kl(policy, reference))
    assert {("mine", "full"), ("theirs", "full")} <= set(out.keys(True))


def test_history_key(policy, reference):
    """torchrl ignores it; here it must be the key that the models read."""
    data = conversations().rename_key_("history", "dialog")
    options = {"input_key": ("dialog", "full")}
    transform = RetrieveKL(
        policy(**options), reference(**options), history_key="dialog", add_to_reward=False
    )
    assert_rows_equal(rows(transform(data), "kl_penalty"), expected_kl(policy, reference))
    with pytest.raises(ValueError, match=r"history_key: expected the key .*'history', 'full'"):
        RetrieveKL(policy(), reference(), history_key="dialog")


class TestEnvironment:
    """torchrl raises ``KeyError``: its specs declare a key that is not the one written."""

    def test_step(self, policy, reference, chat_env, generating_policy):
        env = chat_env(RetrieveKL(policy(), reference(), coeff=0.1))
        data = env.step(generating_policy(env.reset()))["next"]
        kl = rows(data, "kl_penalty")
        gen, ref = rows(data, GEN), rows(data, REF)
        assert all(row.abs().max() > 0.1 for row in kl)
        assert_rows_equal(kl, [x - y for x, y in zip(gen, ref, strict=True)])
        assert_rows_equal(rows(data, "reward"), [1 - 0.1 * row.unsqueeze(-1) for row in kl])

    def test_specs_are_the_shapes_of_the_data(self, policy, reference, chat_env, generating_policy):
        env = chat_env(RetrieveKL(policy(pad_output=True), reference(pad_output=True)))
        data = env.step(generating_policy(env.reset()))["next"]
        for key in (GEN, REF, "kl_penalty"):
            assert env.observation_spec[key].shape == (2, -1)
            assert env.observation_spec[key].is_in(data[key])
        assert env.full_reward_spec["reward"].shape == (2, -1, 1)
        assert env.full_reward_spec["reward"].is_in(data["reward"])

    def test_rollout_of_several_turns(self, policy, reference, chat_env, generating_policy):
        env = chat_env(RetrieveKL(policy(), reference()))
        data = env.rollout(2, generating_policy, break_when_any_done=False)
        assert data.shape == (2, 2)
        for turn in data.unbind(1):
            assert all(row.abs().max() > 0.1 for row in rows(turn["next"], "kl_penalty"))


class TestFromCollector:
    """torchrl raises "collector is not set": it wants the collector before there is one."""

    @pytest.mark.parametrize("pad_output", [False, True])
    def test_in_a_collector(self, reference, chat_env, generating_policy, pad_output):
        transform = RetrieveKL("from_collector", reference(pad_output=pad_output), coeff=0.1)
        settings = copy.deepcopy(generating_policy.tokenizer_kwargs)
        collector = LLMCollector(
            chat_env(transform),
            policy=generating_policy,
            dialog_turns_per_batch=2,
            total_dialog_turns=4,
        )
        batches = [batch.view(-1)["next"] for batch in collector]
        assert len(batches) == 2
        for data in batches:
            kl = rows(data, "kl_penalty")
            assert all(row.abs().max() > 0.1 for row in kl)
            gen, ref = rows(data, GEN), rows(data, REF)
            assert_rows_equal(kl, [x - y for x, y in zip(gen, ref, strict=True)])
            assert_rows_equal(rows(data, "reward"), [1 - 0.1 * row.unsqueeze(-1) for row in kl])
        assert [type(t) for t in transform] == [RetrieveLogProb, RetrieveLogProb, KLComputation]
        assert transform[0].model.model is generating_policy.model, "the weights are shared"
        assert generating_policy.tokenizer_kwargs == settings, "the policy is left as it was"

    def test_a_policy_that_samples_several_answers(
        self, reference, chat_env, policy_model, tokenizer
    ):
        """Each conversation is scored once, whatever the policy generates from a prompt."""
        policy = TransformersWrapper(
            policy_model,
            tokenizer=tokenizer,
            generate=True,
            num_samples=3,
            generate_kwargs={"max_new_tokens": 4, "do_sample": True},
        )
        transform = RetrieveKL("from_collector", reference())
        env = chat_env(transform)
        collector = LLMCollector(env, policy=policy, dialog_turns_per_batch=2, total_dialog_turns=2)
        transform._init_deferred()
        assert transform[0].model.num_samples is None
        kl = rows(transform[0](conversations()), GEN)
        assert len(kl) == len(CHATS)
        collector.shutdown()

    def test_in_an_environment_that_is_wrapped_again(self, reference, chat_env, generating_policy):
        """Wrapping clones the transforms; torchrl's clone is an empty ``Compose``."""
        inner = chat_env(RetrieveKL("from_collector", reference()))
        env = TransformedEnv(inner, OneReward(), auto_unwrap=True)
        assert isinstance(env.transform[-2], RetrieveKL)
        collector = LLMCollector(
            env, policy=generating_policy, dialog_turns_per_batch=2, total_dialog_turns=2
        )
        for batch in collector:
            data = batch.view(-1)["next"]
            assert all(row.abs().max() > 0.1 for row in rows(data, "kl_penalty"))

    def test_specs_need_no_collector(self, reference, chat_env):
        env = chat_env(RetrieveKL("from_collector", reference()))
        assert {GEN, REF, "kl_penalty"} <= set(env.observation_spec.keys(True, True))
        env.reset()

    def test_specs_are_those_of_the_initialised_transform(self, policy, reference):
        def specs(transform):
            spec = Composite(
                full_observation_spec=Composite(shape=(2,)),
                full_reward_spec=Composite(reward=Unbounded((2, 1, 1)), shape=(2,)),
                shape=(2,),
            )
            return transform.transform_output_spec(spec)

        deferred = specs(RetrieveKL("from_collector", reference()))
        assert deferred == specs(RetrieveKL(policy(), reference()))

    def test_without_environment_or_collector(self, reference, chat_env, generating_policy):
        with pytest.raises(ValueError, match="expected this transform in an environment"):
            RetrieveKL("from_collector", reference())(conversations())
        env = chat_env(RetrieveKL("from_collector", reference()))
        with pytest.raises(ValueError, match="expected an environment run by a collector"):
            env.step(generating_policy(env.reset()))

    def test_keys_are_checked_at_once(self, reference):
        with pytest.raises(ValueError, match="gen_log_probs_full_key: expected a tuple"):
            RetrieveKL("from_collector", reference(), gen_log_probs_full_key="flat")


def test_models_that_do_not_fit_are_refused(policy, reference, wrap, policy_model):
    cases = [
        (lambda: RetrieveKL(policy()), "ref_model: expected a log-prob wrapper"),
        (lambda: RetrieveKL(None, reference()), "gen_model: expected a log-prob wrapper"),
        (
            lambda: RetrieveKL(policy(pad_output=True), reference()),
            "pad_output mismatch: expected False",
        ),
        (lambda: RetrieveKL(wrap(policy_model, "ref_log_probs"), reference()), "log_probs_key"),
        (lambda: RetrieveKL(policy(generate=True), reference()), "generate=False"),
        (lambda: RetrieveKL(policy(), reference(), gen_model_factory=policy), "got both"),
        (lambda: RetrieveKL(policy(), reference(), ref_model_factory=reference), "got both"),
    ]
    for build, message in cases:
        with pytest.raises(ValueError, match=message):
            build()


@pytest.mark.parametrize(("wrong", "right"), [("nonsense", "unknown")])
def test_unknown_arguments_are_refused(policy, reference, wrong, right):
    with pytest.raises(TypeError, match=rf"{wrong}: .*{right}"):
        RetrieveKL(policy(), reference(), **{wrong: 1})


def test_a_missing_conversation_is_named(policy, reference):
    with pytest.raises(ValueError, match="history"):
        RetrieveKL(policy(), reference())(TensorDict(batch_size=(2,)))
