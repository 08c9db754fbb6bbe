"""``RetrieveKL`` beside torchrl's, over every input mode, layout and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from ..dialogs import CHATS, conversations, rows
from .comparison import (
    CASES,
    GEN,
    LAYOUTS,
    REF,
    assert_same,
    assert_values,
    both,
    dialogs,
    with_next,
)

PLAIN = [(mode, layout) for mode, layout in LAYOUTS if layout != "stack"]
COLUMNS = (GEN, REF, "kl_penalty", "reward")


@pytest.fixture
def scored(policy) -> TensorDictBase:
    return policy()(conversations())


def given(mode: str, layout: str, scored: Any, reward: bool, in_next: bool = False) -> Any:
    data = dialogs(mode, layout, scored)
    if reward:
        data["reward"] = torch.arange(3.0).view(len(CHATS), 1, 1)
    return with_next(data) if in_next else data


@pytest.fixture
def build(policy, reference):
    """``RetrieveKL`` of a class, over both models in a mode."""

    def build(cls: Any, mode: str = "history", pad_output: bool = False, **options: Any) -> Any:
        models = (make(pad_output=pad_output, input_mode=mode) for make in (policy, reference))
        return cls(
            *models,
            assistant_only=options.pop("assistant_only", mode == "history"),
            coeff=0.3,
            **options,
        )

    return build


STACKED = [case for case in CASES if case[1] == "stack"]


@pytest.mark.parametrize(("mode", "layout", "pad_output", "assistant_only"), STACKED)
@pytest.mark.parametrize("add_to_reward", [False, True])
@pytest.mark.parametrize("reward", [False, True])
@pytest.mark.parametrize("in_next", [False, True])
def test_a_stack_of_samples(
    build, scored, mode, layout, pad_output, assistant_only, add_to_reward, reward, in_next
):
    answers = []
    for cls in both("RetrieveKL"):
        transform = build(
            cls, mode, pad_output, assistant_only=assistant_only, add_to_reward=add_to_reward
        )
        data = given(mode, layout, scored, reward, in_next)
        out = transform(data)
        answers.append(out["next"] if in_next else out)
    assert_same(*answers, *COLUMNS)
    assert all(row.abs().max() > 0.1 for row in rows(answers[0], "kl_penalty"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_keys(build, side):
    """The keys in and out of the three transforms."""
    options = {
        "gen_log_probs_full_key": ("mine", "full"),
        "ref_log_probs_full_key": ("theirs", "full"),
        "kl_key": ("info", "kl"),
        "padding_side": side,
    }
    ours, theirs = (build(cls, **options) for cls in both("RetrieveKL"))
    assert [t.in_keys for t in ours] == [t.in_keys for t in theirs]
    assert [t.out_keys for t in ours] == [t.out_keys for t in theirs]
    assert ours.in_keys == theirs.in_keys and ours.out_keys == theirs.out_keys
    answers = [t(conversations(stacked=True)) for t in (ours, theirs)]
    assert_same(*answers, ("mine", "full"), ("theirs", "full"), ("info", "kl"))


class TestWhereTorchrlIsWrong:
    """torchrl raises, or answers in another kind; ours is its answer for a stack of the samples."""

    def check(self, out, scored, mode, build, pad_output, reward, **options):
        _, theirs = both("RetrieveKL")
        data = given(mode, "stack", scored, reward)
        expected = build(theirs, mode, pad_output, **options)(data)
        for key in COLUMNS if reward else COLUMNS[:-1]:
            assert_values(out, expected, key)

    @pytest.mark.parametrize(("mode", "layout"), PLAIN)
    @pytest.mark.parametrize("add_to_reward", [False, True])
    @pytest.mark.parametrize("reward", [False, True])
    @pytest.mark.parametrize("in_next", [False, True])
    def test_unpadded_plain_tensordicts_raise(
        self, build, scored, mode, layout, add_to_reward, reward, in_next
    ):
        ours, theirs = both("RetrieveKL")
        options = {"add_to_reward": add_to_reward}
        data = given(mode, layout, scored, reward, in_next)
        with pytest.raises(RuntimeError, match="stack"):
            build(theirs, mode, **options)(data.clone())
        out = build(ours, mode, **options)(data)
        out = out["next"] if in_next else out
        assert out["kl_penalty"].is_nested
        self.check(out, scored, mode, build, False, reward, **options)

    @pytest.mark.parametrize(("mode", "layout"), PLAIN)
    @pytest.mark.parametrize("reward", [False, True])
    @pytest.mark.parametrize("in_next", [False, True])
    def test_padded_plain_tensordicts_raise_or_give_a_nested_kl(
        self, build, scored, mode, layout, reward, in_next
    ):
        """Its docstring shows ``torch.Size([2, 26])``."""
        ours, theirs = both("RetrieveKL")
        data = given(mode, layout, scored, reward, in_next)
        if reward:
            with pytest.raises(RuntimeError, match="nested"):
                build(theirs, mode, True)(data.clone())
        else:
            out = build(theirs, mode, True)(data.clone())
            assert (out["next"] if in_next else out)["kl_penalty"].is_nested
        out = build(ours, mode, True)(data)
        out = out["next"] if in_next else out
        assert not out["kl_penalty"].is_nested
        self.check(out, scored, mode, build, True, reward)
