"""``RetrieveLogProb`` beside torchrl's, over every input mode, layout and option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from ..dialogs import conversations, rows
from .comparison import CASES, assert_same, assert_values, both, dialogs, with_next

KEY = ("gen_log_probs", "full")


@pytest.fixture
def scored(policy) -> TensorDictBase:
    return policy()(conversations())


def answers(build: Any, data: Any, in_next: bool = False) -> list[TensorDictBase]:
    """What ``build(cls)`` writes for ``data()``, for our class and torchrl's."""
    found, returned = [], []
    for cls in both("RetrieveLogProb"):
        given = with_next(data()) if in_next else data()
        out = build(cls)(given)
        returned.append(out is given)
        found.append(out["next"] if in_next else out)
    assert returned[0] == returned[1]
    return found


@pytest.mark.parametrize(("mode", "layout", "pad_output", "assistant_only"), CASES)
@pytest.mark.parametrize("in_next", [False, True])
def test_log_probs(policy, scored, mode, layout, pad_output, assistant_only, in_next):
    def build(cls):
        wrapper = policy(pad_output=pad_output, input_mode=mode)
        return cls(wrapper, assistant_only=assistant_only)

    ours, theirs = answers(build, lambda: dialogs(mode, layout, scored), in_next)
    assert_same(ours, theirs, KEY)
    assert type(ours["gen_log_probs"]) is type(theirs["gen_log_probs"])
    assert all((row != 0).any() for row in rows(ours, KEY))


@pytest.mark.parametrize(("mode", "layout", "pad_output", "assistant_only"), CASES)
def test_own_key(policy, scored, mode, layout, pad_output, assistant_only):
    """torchrl cannot rename unpadded log-probs in a plain tensordict."""
    key = ("other", "full")

    def build(cls):
        wrapper = policy(pad_output=pad_output, input_mode=mode)
        return cls(wrapper, assistant_only=assistant_only, log_probs_full_key=key)

    def data():
        return dialogs(mode, layout, scored)

    if layout == "stack" or pad_output:
        assert_same(*answers(build, data), key)
        return
    ours, theirs = both("RetrieveLogProb")
    with pytest.raises(RuntimeError, match="stack"):
        build(theirs)(data())
    stacked = build(theirs)(dialogs(mode, "stack", scored))
    assert_values(build(ours)(data()), stacked, key)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("stacked", [False, True])
def test_layout_of_the_wrapper(policy, layout, stacked):
    found = answers(lambda cls: cls(policy(layout=layout)), lambda: conversations(stacked=stacked))
    assert_same(*found, KEY)


def test_a_single_conversation(policy):
    """Batch of 1, where nothing is padded."""
    assert_same(*answers(lambda cls: cls(policy()), lambda: conversations()[:1]), KEY)


@pytest.mark.parametrize("input_key", [None, "history", ("history", "full")])
def test_input_keys_and_out_keys(policy, input_key):
    ours, theirs = (cls(policy(input_key=input_key)) for cls in both("RetrieveLogProb"))
    assert ours.in_keys == theirs.in_keys and ours.out_keys == theirs.out_keys


class TestWhereTorchrlIsWrong:
    """Each test shows torchrl's answer first, so that a torchrl that mends it is noticed."""

    def test_packed_model_inputs_see_later_tokens(self, policy):
        """A token's log-prob must not depend on how the batch is laid out."""
        ours, theirs = answers(lambda cls: cls(policy(pad_model_input=False)), conversations)
        _, expected = answers(lambda cls: cls(policy()), conversations)
        pairs = zip(rows(theirs, KEY), rows(expected, KEY), strict=True)
        assert max((x - y).abs().max() for x, y in pairs) > 0.01
        assert_values(ours, expected, KEY)
