"""``KLRewardTransform``: the policy's log-probs in the data against a reference's."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import KLRewardTransform as TorchrlKLRewardTransform
from torchrl.modules.llm import TransformersWrapper

from fusedrl import KLRewardTransform

from .conftest import QUESTIONS
from .dialogs import assert_rows_equal, rows

FULL = ("log_probs", "full")
LENGTHS, PROMPTS = (7, 4, 9), (3, 1, 4)
COEF = 0.3


@pytest.fixture
def tokens_reference(wrap, reference_model):
    """The reference as torchrl wants it here: of tokens, its log-probs under the policy's key."""
    return lambda **options: wrap(reference_model, **{"input_mode": "tokens", **options})


def samples(*, assistant: bool = True) -> list[TensorDict]:
    """What a policy leaves of three answers, without a batch."""
    torch.manual_seed(3)
    made = []
    for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
        ids = torch.randint(10, 200, (length,))
        td = TensorDict(
            {
                ("tokens", "full"): ids,
                ("tokens", "prompt"): ids[:prompt],
                ("masks", "all_attention_mask"): torch.ones(length, dtype=torch.bool),
                FULL: -torch.rand(length),
            }
        )
        if assistant:
            td["masks", "all_assistant_mask"] = torch.arange(length) >= prompt
        made.append(td)
    return made


def with_reward(made: list[TensorDict], *, per_token: bool = True) -> list[TensorDict]:
    for i, td in enumerate(made):
        shape = (len(td["tokens", "full"]), 1) if per_token else (1, 1)
        td["next"] = TensorDict(reward=torch.full(shape, 1.0 + i))
    return made


def expected(model, made, *, assistant_only=True) -> tuple[list, list, list]:
    """Reward, KL and reference by hand, from logits of each sample on its own."""
    answers = ([], [], [])
    for i, td in enumerate(made):
        ids = td["tokens", "full"]
        with torch.no_grad():
            logits = model(ids[None]).logits[0].double().log_softmax(-1)
        ref = torch.cat([torch.zeros(1), logits[:-1].gather(1, ids[1:, None])[:, 0].float()])
        kept = torch.arange(len(ids)) >= PROMPTS[i]
        kept = kept if assistant_only else torch.ones_like(kept)
        kl = torch.where(kept, td[FULL] - ref, 0)
        assert kl.abs().max() > 0.1
        reward = td["next", "reward"] if "next" in td else torch.zeros(1, 1)
        for answer, value in zip(
            answers, (reward - COEF * kl[:, None], kl[:, None], (ref * kept)[:, None]), strict=True
        ):
            answer.append(value)
    return answers


def check(out, wanted, keys=("reward", "kl_penalty", "ref_log_probs")) -> None:
    for key, value in zip(keys, wanted, strict=True):
        assert_rows_equal(rows(out, key), value)


def plain(made: list[TensorDict], layout: torch.layout) -> TensorDict:
    """The samples as one tensordict of nested columns."""
    data = TensorDict(batch_size=(len(made),))
    for key in made[0].keys(True, True):
        data[key] = torch.nested.as_nested_tensor([td[key] for td in made], layout=layout)
    return data


def padded(made: list[TensorDict]) -> TensorDict:
    """The samples as a policy pads them: prompts on the left, answers on the right."""
    widest = [max(PROMPTS), max(n - p for n, p in zip(LENGTHS, PROMPTS, strict=True))]
    data = TensorDict(batch_size=(len(made),))
    for key in made[0].keys(True, True):
        column = []
        for td, prompt in zip(made, PROMPTS, strict=True):
            row, pad = td[key], [0] * (2 * (td[key].dim() - 1))
            left = (widest[0] - prompt, 0)
            if key == ("tokens", "prompt"):
                column.append(torch.nn.functional.pad(row, left))
                continue
            right = (0, widest[1] - (len(row) - prompt))
            column.append(torch.nn.functional.pad(row, (*pad, left[0], right[1])))
        data[key] = torch.stack(column)
    return data


@pytest.mark.parametrize("assistant_only", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_stack_of_samples(tokens_reference, reference_model, assistant_only, per_token, masked):
    """torchrl needs an environment, and has an UnboundLocalError with assistant_only=False."""
    made = with_reward(samples(assistant=masked), per_token=per_token)
    data = lazy_stack(made)
    transform = KLRewardTransform(tokens_reference(), coef=COEF, assistant_only=assistant_only)
    wanted = expected(reference_model, samples_of(made), assistant_only=assistant_only)
    out = transform(data)
    assert out is data
    check(out["next"], wanted)


def samples_of(made):
    return [td.clone() for td in made]


@pytest.mark.parametrize("with_next", [False, True])
def test_one_sample_without_a_batch(tokens_reference, reference_model, with_next):
    td = with_reward(samples())[0]
    wanted = [column[0] for column in expected(reference_model, [td])]
    if not with_next:
        td = td.exclude("next").set("reward", td["next", "reward"])
    out = KLRewardTransform(tokens_reference(), coef=COEF)(td)
    assert out is td
    out = out["next"] if with_next else out
    assert_rows_equal([out[key] for key in ("reward", "kl_penalty", "ref_log_probs")], wanted)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("assistant_only", [False, True])
def test_nested_columns(tokens_reference, reference_model, layout, per_token, assistant_only):
    made = with_reward(samples(), per_token=per_token)
    transform = KLRewardTransform(tokens_reference(), coef=COEF, assistant_only=assistant_only)
    out = transform(plain(made, layout))["next"]
    check(out, expected(reference_model, made, assistant_only=assistant_only))
    assert out["reward"].layout == layout


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_padded_columns(tokens_reference, reference_model, masked, per_token):
    made = with_reward(samples(assistant=masked))
    data = padded(made)
    if not per_token:
        data["next", "reward"] = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    attended = data["masks", "all_attention_mask"]
    out = KLRewardTransform(tokens_reference(pad_output=True), coef=COEF)(data)["next"]
    for key, value in zip(
        ("reward", "kl_penalty", "ref_log_probs"), expected(reference_model, made), strict=True
    ):
        assert out[key].shape == (*attended.shape, 1)
        assert_rows_equal([row[mask] for row, mask in zip(out[key], attended, strict=True)], value)
    assert not out["kl_penalty"][~attended].any()


@pytest.mark.parametrize("pad_output", [False, True])
def test_the_values_are_those_of_torchrl(tokenizer, wrap, reference_model, pad_output):
    """Where torchrl's runs: in an environment, with dense data or a sample of its own."""
    answers = []
    for cls in (KLRewardTransform, TorchrlKLRewardTransform):
        reference = wrap(reference_model, input_mode="tokens", pad_output=pad_output)
        transform = cls(reference, coef=COEF)
        data = (
            padded(with_reward(samples())) if pad_output else lazy_stack(with_reward(samples())[:1])
        )
        env = ChatEnv(batch_size=data.batch_size, tokenizer=tokenizer, input_mode="tokens")
        env = TransformedEnv(env, transform)
        answers.append((transform, transform._step(data, data["next"])))
        assert transform.action_key == ("tokens", "full")
    (ours, out), (theirs, other) = answers
    assert (ours.in_keys, ours.out_keys) == (theirs.in_keys, theirs.out_keys)
    for key in ours.out_keys:
        assert_rows_equal(rows(out, key), [row.detach() for row in rows(other, key)])


@pytest.mark.parametrize("coef", [COEF, 1, torch.tensor([COEF])])
def test_no_reward_in_the_data_is_a_reward_of_zero(tokens_reference, reference_model, coef):
    """torchrl raises AttributeError."""
    made = samples()
    data = KLRewardTransform(tokens_reference(), coef=coef)(lazy_stack(samples_of(made)))
    _, *wanted = expected(reference_model, made)
    check(data, [[-float(coef) * kl for kl in wanted[0]], *wanted])


def test_own_keys(tokens_reference, wrap, reference_model):
    made = with_reward(samples())
    wanted = expected(reference_model, made)
    for td in made:
        td.rename_key_("log_probs", "mine")
        td["next"].rename_key_("reward", "score")
    out_keys = ["total", ("info", "kl"), ("info", "ref")]
    transform = KLRewardTransform(
        wrap(reference_model, "theirs", input_mode="tokens"),
        coef=COEF,
        in_keys=["score"],
        out_keys=out_keys,
        log_prob_key=("mine", "full"),
    )
    check(transform(lazy_stack(made))["next"], wanted, out_keys)


def test_log_probs_of_the_answer_alone(tokens_reference, reference_model):
    """What a policy that generates writes; the prompt then has no KL, masked or not."""
    made = with_reward(samples())
    wanted = expected(reference_model, made)
    for td, prompt in zip(made, PROMPTS, strict=True):
        td["log_probs"] = TensorDict(response=td[FULL][prompt:])
    for assistant_only in (True, False):
        transform = KLRewardTransform(tokens_reference(), coef=COEF, assistant_only=assistant_only)
        out = transform(lazy_stack(samples_of(made)))["next"]
        check(out, wanted[:2], ("reward", "kl_penalty"))


@pytest.mark.parametrize("detach", [False, True])
def test_gradients_only_where_asked_for(tokens_reference, detach):
    made = samples()
    leaf = made[0][FULL].requires_grad_()
    made[0][FULL] = leaf
    out = KLRewardTransform(tokens_reference(), coef=COEF, detach=detach)(lazy_stack(made))
    reward = rows(out, "reward")[0]
    assert reward.requires_grad is not detach
    if not detach:
        reward.sum().backward()
        torch.testing.assert_close(leaf.grad, -COEF * (torch.arange(7) >= PROMPTS[0]).float())


def refused_data():
    def drop(key, where=slice(None)):
        made = with_reward(samples())
        for td in made[where]:
            del td[key]
        return lazy_stack(made)

    last = slice(2, None)
    mask = ("masks", "all_assistant_mask")
    short = with_reward(samples())
    short[1][FULL] = short[1][FULL][1:]
    flat = padded(with_reward(samples()))
    flat["next", "reward"] = torch.ones(3, 1)
    no_mask = lazy_stack(with_reward(samples(assistant=False)))
    for td in no_mask.tensordicts:
        del td["tokens", "prompt"]
    return {
        "tokens": (drop(("tokens", "full")), RuntimeError, "tokens to score"),
        "log-probs": (drop(FULL), ValueError, "policy's log-probs"),
        "lengths": (lazy_stack(short), ValueError, "sample 1"),
        "mask": (no_mask, ValueError, "assistant mask"),
        "reward": (flat, ValueError, "reward: sample 0: expected"),
        "tokens of one": (drop(("tokens", "full"), last), ValueError, "sample 2"),
        "log-probs of one": (drop(FULL, last), ValueError, "sample 2"),
        "mask of one": (drop(mask, last), ValueError, "sample 2"),
        "reward of one": (drop(("next", "reward"), last), ValueError, "sample 2"),
        "next of one": (drop("next", last), ValueError, "sample 2"),
    }


@pytest.mark.parametrize("what", refused_data())
def test_refused_data_are_unchanged(tokens_reference, what):
    """torchrl has popped "next" by then."""
    data, error, message = refused_data()[what]
    samples = getattr(data, "tensordicts", [data])
    before = [dict(td.clone().items(True, True)) for td in samples]
    with pytest.raises(error, match=message):
        KLRewardTransform(tokens_reference(pad_output=what == "reward"))(data)
    for td, entries in zip(samples, before, strict=True):
        torch.testing.assert_close(dict(td.items(True, True)), entries, rtol=0, atol=0)


# torchrl's environment of tokens cannot reset to prompts of different lengths.
ENVIRONMENTS = [("history", QUESTIONS), ("tokens", ["How are you?"] * 2)]


@pytest.mark.parametrize(("mode", "questions"), ENVIRONMENTS)
@pytest.mark.parametrize("pad_output", [False, True])
class TestEnvironment:
    @pytest.fixture
    def generating(self, tokenizer, policy_model, mode, pad_output):
        return TransformersWrapper(
            policy_model,
            tokenizer=tokenizer,
            input_mode=mode,
            generate=True,
            return_log_probs=True,
            pad_output=pad_output,
            generate_kwargs={"max_new_tokens": 6, "do_sample": True},
        )

    @pytest.fixture
    def env(self, chat_env, tokens_reference, mode, questions, pad_output):
        transform = KLRewardTransform(tokens_reference(pad_output=pad_output), coef=COEF)
        return chat_env(transform, mode=mode, questions=questions)

    def test_a_step_and_its_specs(self, env, generating, reference_model):
        data = generating(env.reset())
        out = env.step(data)["next"]
        assert env.transform[-1].action_key[-1] == "full"
        answers = rows(data, ("log_probs", "response"))
        for i, (ids, answer) in enumerate(
            zip(rows(data, ("tokens", "full")), answers, strict=True)
        ):
            attended = rows(data, ("masks", "all_attention_mask"))[i]
            first = len(ids) - len(answer)
            with torch.no_grad():
                logits = reference_model(ids[attended][None]).logits[0].log_softmax(-1)
            scores = torch.zeros(len(ids))
            scores[attended] = torch.cat(
                [torch.zeros(1), logits[:-1].gather(1, ids[attended][1:, None])[:, 0]]
            )
            kl = torch.where(attended[first:], answer - scores[first:], 0)
            assert kl.abs().max() > 0.1
            got = rows(out, "kl_penalty")[i].squeeze(-1)
            assert not got[:first].any()
            torch.testing.assert_close(got[first:], kl, rtol=1e-4, atol=1e-4)
            reward = rows(out, "reward")[i].squeeze(-1)
            torch.testing.assert_close(reward, 1 - COEF * got)
        spec = env.observation_spec["kl_penalty"]
        assert spec.shape == (2, -1, 1) and spec.dtype == rows(out, "kl_penalty")[0].dtype
        for key in ("kl_penalty", "ref_log_probs"):
            assert {row.dim() for row in rows(out, key)} == {2}
        assert env.full_reward_spec["reward"].shape == (2, -1, 1)
