"""Dialogs of different lengths in one turn, for policies that take those of one length only."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting, seen
from counting_dialogs import policy as numbers_policy
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Composite, Unbounded

from fusedrl import ChannelWeightSyncScheme
from fusedrl.collectors.turns import call_by_length


def history(length: int) -> TensorDict:
    return TensorDict({"role": torch.zeros(length)}, [length])


class Growing(Counting):
    """Dialogs with a history of a message a turn; row ``i`` ends after ``2 + i``."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__(rows, 2, lazy=True)
        message = Composite(role=Unbounded((rows, -1)), shape=(rows,))
        self.observation_spec["history"] = Composite(prompt=message, shape=(rows,))

    def _state(self, **more: Any) -> TensorDictBase:
        state = super()._state(**more)
        for row, turn in zip(state.unbind(0), self.turn.flatten().tolist(), strict=True):
            row["history", "prompt"] = history(turn + 1)
        return state


def lengths(dialogs: TensorDictBase) -> list[int]:
    prompts = [row["history", "prompt"] for row in dialogs.reshape(-1).unbind(0)]
    return [prompt.batch_size[-1] for prompt in prompts]


def strict(dialogs: TensorDictBase) -> TensorDictBase:
    """Takes a stack of histories apart, as torchrl's wrappers of language models do."""
    dialogs["history", "prompt"].unbind(-1)
    return numbers_policy(dialogs)


def dialog(length: int) -> TensorDict:
    prompt = {"prompt": history(length)}
    return TensorDict({"seen": torch.tensor([length]), "history": prompt})


class TestCalls:
    @pytest.fixture
    def calls(self):
        return []

    @pytest.fixture
    def policy(self, calls):
        def policy(dialogs):
            calls.append(lengths(dialogs))
            return dialogs.clone().set("action", 10 * dialogs["seen"])

        return policy

    def test_one_for_each_length_and_answers_in_order(self, policy, calls):
        answers = call_by_length(policy, lazy_stack([dialog(n) for n in (3, 1, 3, 2, 1)]))
        assert calls == [[3, 3], [1, 1], [2]]
        assert answers["action"].flatten().tolist() == [30, 10, 30, 20, 10]
        assert lengths(answers) == [3, 1, 3, 2, 1]

    def test_one_where_lengths_are_equal(self, policy, calls):
        dialogs = lazy_stack([dialog(2), dialog(2)])
        assert call_by_length(lambda given: given, dialogs) is dialogs
        call_by_length(policy, dialogs)
        assert calls == [[2, 2]]


@pytest.mark.parametrize("mode", [{}, {"yield_completed_trajectories": True}], ids=str)
def test_the_batches_are_those_of_a_policy_that_takes_all_lengths(collect, mode):
    batches = [
        [seen(batch.reshape(-1)) for batch in collect(env, policy=policy, **mode)]
        for env, policy in ((Growing(), strict), (Counting(2, 2, lazy=True), numbers_policy))
    ]
    assert batches[0] == batches[1] and len(batches[0]) == 2


def test_a_turn_has_one_version_of_weights(collect):
    """Though the policy is called twice, and the scheme switches versions within each call."""
    collector = collect(
        Growing(),
        policy=policy_of(Says(1)),
        dialog_turns_per_batch=2,
        total_dialog_turns=16,
        weight_sync_schemes={"policy": ChannelWeightSyncScheme()},
        track_policy_version=True,
    )
    collector.policy.register_forward_hook(
        lambda *_: collector.update_policy_weights_(policy_of(Says(collector.policy_version + 1)))
    )
    turns = [of(batch) for batch in collector]
    assert all(len(set(turn)) == 1 for turn in turns)
    versions = [turn[0] for turn in turns]
    assert 2 in {later - earlier for earlier, later in itertools.pairwise(versions)}
