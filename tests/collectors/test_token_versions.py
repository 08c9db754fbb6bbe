"""Versions of tokens that a policy reports: where a collector has them, and what a turn's is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting_dialogs import Counting, policy
from tensordict import TensorDictBase

KEY, TOKENS = "policy_version", "token_policy_version"
PADDED = torch.tensor([[5, 4, -1], [6, -1, -1]])
RAGGED = [torch.tensor([5, 4]), torch.tensor([6])]


class Reports:
    """Answers as the numbers' policy does, and reports versions of tokens.

    Args:
        rows: of each call, of which an environment of one dialog has the first.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __call__(self, carried: TensorDictBase) -> TensorDictBase:
        actions = policy(carried)
        if isinstance(self.rows, torch.Tensor):
            return actions.set(TOKENS, self.rows.clone())
        actions = actions if hasattr(actions, "tensordicts") else actions.to_lazystack(0)
        for row, versions in zip(actions.tensordicts, self.rows, strict=False):
            row.set(TOKENS, versions.expand(*row.batch_size, -1).clone())
        return actions


@pytest.mark.parametrize("mode", [{}, {"flatten_data": True}], ids=str)
@pytest.mark.parametrize("rows", [PADDED, RAGGED], ids=["padded", "ragged"])
def test_a_turn_has_the_oldest_version_of_its_tokens(collect, rows, mode):
    env = Counting(lazy=rows is RAGGED)
    collector = collect(env, policy=Reports(rows), track_policy_version=True, **mode)
    turns = collector.next().reshape(-1)
    of_row = [[4, 5], [6]] if rows is RAGGED else [[-1, 4, 5], [-1, -1, 6]]
    for part in (turns, turns["next"]):
        assert sorted(part[KEY].tolist()) == [4, 4, 6, 6] and part[KEY].dtype == torch.int64
        reported = sorted(sorted(row.tolist()) for row in part.get(TOKENS, as_list=True))
        assert reported == sorted([*of_row, *of_row])
    assert collector.policy_version_tracker.span(turns) == (4, 6)
    assert collector.policy_version == 0


@pytest.mark.parametrize(
    "rows",
    [torch.full((2, 3), -1), torch.zeros(2, 0, dtype=torch.int64), [torch.zeros(0).long()] * 2],
    ids=["padding", "none", "ragged"],
)
def test_answers_without_a_token_have_the_version_of_the_call(collect, rows):
    env = Counting(lazy=isinstance(rows, list))
    collector = collect(env, policy=Reports(rows), track_policy_version=True)
    collector.increment_version()
    assert collector.next()["next", KEY].tolist() == [[1, 1]] * 2
