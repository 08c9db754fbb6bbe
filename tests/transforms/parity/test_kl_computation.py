"""``KLComputation`` beside torchrl's, over every layout of log-probs and rewards."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import LogProbs

from .comparison import GEN, REF, assert_same, assert_values, both

LENGTHS = (3, 5, 2)
REWARDS = {None: None, "tokens": (-1, 1), "sample": (1, 1), "columns": (-1, 2)}
VALUES = ["finite", "missing", "object"]


def samples(reward: str | None, lengths: tuple[int, ...], values: str = "finite") -> list:
    made = []
    for n in lengths:
        td = TensorDict({GEN: torch.randn(n), REF: torch.randn(n)})
        if reward is not None:
            td["reward"] = torch.randn(*(n if size == -1 else size for size in REWARDS[reward]))
        made.append(td)
    if values == "missing":
        made[0][GEN][0] = made[1][REF][1] = float("nan")
        made[2][GEN][1] = float("-inf")
    if values == "object":
        for td in made:
            td["log_probs"] = LogProbs(full=td[GEN], batch_size=())
    return made


def plain(made: list, layout: str) -> TensorDictBase:
    """The samples' columns, each as one tensor."""
    data = TensorDict(batch_size=(len(made),))
    for key in made[0].keys(True, True):
        column = [td[key].clone() for td in made]
        if layout == "dense":
            data[key] = torch.stack(column)
        else:
            data[key] = torch.nested.as_nested_tensor(column, layout=getattr(torch, layout))
    return data


def stacked(made: list, in_next: bool = False) -> TensorDictBase:
    made = [td.clone() for td in made]
    return lazy_stack([TensorDict(next=td) for td in made] if in_next else made)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("in_next", [False, True])
@pytest.mark.parametrize("add_to_reward", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4, 4)], ids=["ragged", "equal"])
def test_a_stack_of_samples(values, reward, in_next, add_to_reward, lengths):
    made = samples(reward, lengths, values)
    ours, theirs = (
        cls(coeff=0.3, add_to_reward=add_to_reward)(stacked(made, in_next))
        for cls in both("KLComputation")
    )
    assert set(map(str, ours.keys(True))) == set(map(str, theirs.keys(True)))
    answers = (ours["next"], theirs["next"]) if in_next else (ours, theirs)
    assert_same(*answers, GEN, REF, "kl_penalty", "reward")


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("in_next", [False, True])
@pytest.mark.parametrize("values", ["finite", "missing"])
def test_jagged_columns_beside_a_reward_that_is_left_alone(reward, in_next, values):
    made = samples(reward, LENGTHS, values)
    answers = []
    for cls in both("KLComputation"):
        data = plain(made, "jagged")
        data = TensorDict(next=data, batch_size=data.batch_size) if in_next else data
        out = cls(add_to_reward=False)(data)
        assert out is data
        answers.append(out["next"] if in_next else out)
    assert_same(*answers, GEN, REF, "kl_penalty", "reward")


class TestWhereTorchrlIsWrong:
    """torchrl raises, or answers in another kind; ours is its answer for a stack of the samples."""

    def check(self, ours, made, layout, **options):
        _, theirs = both("KLComputation")
        expected = theirs(coeff=0.3, **options)(stacked(made))
        for key in ("kl_penalty", "reward"):
            if key in expected:
                assert_values(ours, expected, key)
                assert ours[key].is_nested is (layout != "dense")
                assert ours[key].layout == getattr(torch, layout, torch.strided)

    @pytest.mark.parametrize("reward", ["tokens", "sample", "columns"])
    @pytest.mark.parametrize("layout", ["strided", "jagged", "dense"])
    def test_a_plain_tensordict_with_a_reward_raises(self, layout, reward):
        lengths = (4, 4, 4) if layout == "dense" else LENGTHS
        made = samples(reward, lengths)
        ours, theirs = both("KLComputation")
        with pytest.raises(RuntimeError):
            theirs(coeff=0.3)(plain(made, layout))
        self.check(ours(coeff=0.3)(plain(made, layout)), made, layout)

    @pytest.mark.parametrize("reward", REWARDS)
    def test_strided_columns_raise_without_a_penalty_too(self, reward):
        made = samples(reward, LENGTHS)
        ours, theirs = both("KLComputation")
        with pytest.raises(RuntimeError, match="support sizes"):
            theirs(add_to_reward=False)(plain(made, "strided"))
        out = ours(add_to_reward=False)(plain(made, "strided"))
        self.check(out, made, "strided", add_to_reward=False)

    def test_jagged_log_probs_with_strided_rewards_of_columns_raise(self):
        made = samples("columns", LENGTHS)
        reward = plain(made, "strided")["reward"]
        ours, theirs = both("KLComputation")
        with pytest.raises(RuntimeError, match="broadcasting"):
            theirs(coeff=0.3)(plain(made, "jagged").set("reward", reward))
        self.check(ours(coeff=0.3)(plain(made, "jagged").set("reward", reward)), made, "strided")

    @pytest.mark.parametrize("in_next", [False, True])
    def test_dense_columns_give_a_nested_kl(self, in_next):
        """Its docstring shows ``torch.Size([2, 10])``."""
        made = samples(None, (10, 10))
        answers = []
        for cls in both("KLComputation"):
            data = plain(made, "dense")
            out = cls()(TensorDict(next=data, batch_size=(2,)) if in_next else data)
            answers.append(out["next"] if in_next else out)
        ours, theirs = answers
        assert theirs["kl_penalty"].is_nested and ours["kl_penalty"].shape == (2, 10)
        self.check(ours, made, "dense")

    def test_a_stack_of_stacks_raises(self):
        made = samples("tokens", LENGTHS)
        ours, theirs = both("KLComputation")

        def data():
            return lazy_stack([stacked(made[:1]), stacked(made[1:2])])

        with pytest.raises((AttributeError, RuntimeError)):
            theirs()(data())
        out = ours(coeff=0.3)(data()).reshape(-1)
        assert_values(out, both("KLComputation")[1](coeff=0.3)(stacked(made[:2])), "reward")
