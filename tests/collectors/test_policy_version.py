"""PolicyVersion: its counts, what it writes, and that specs say what is written."""

from __future__ import annotations

import pytest
import torch
from counting_dialogs import Counting, policy
from tensordict import TensorDict, lazy_stack
from torchrl.envs import SerialEnv, TransformedEnv
from torchrl.envs.llm.transforms import PolicyVersion as TorchrlPolicyVersion
from torchrl.envs.utils import check_env_specs

from fusedrl import PolicyVersion


def batch_of(*versions, **entries) -> TensorDict:
    return TensorDict(
        {("next", "policy_version"): torch.tensor(versions), **entries}, (len(versions),)
    )


@pytest.mark.parametrize("version_type", [int, "int"])
def test_integers_count_from_zero(version_type):
    tracker = PolicyVersion(version_type)
    assert tracker.version == 0 and tracker.cal_on_reset
    tracker.increment_version()
    tracker.version += 5
    assert tracker.version == 6
    changes = [(change.old_version, change.new_version) for change in tracker.version_history]
    assert changes == [(None, 0), (0, 1), (1, 6)]
    assert isinstance(tracker, TorchrlPolicyVersion)


@pytest.mark.parametrize("version_type", [str, "uuid", "text"])
def test_versions_are_integers(version_type):
    with pytest.raises(ValueError, match=r"version_type: expected 'int', got .*; versions are int"):
        PolicyVersion(version_type)


@pytest.mark.parametrize(
    ("value", "error"),
    [("seven", TypeError), (True, TypeError), (1.5, TypeError), (-3, ValueError)],
)
def test_a_version_of_another_type_is_refused(value, error):
    tracker = PolicyVersion()
    with pytest.raises(error):
        tracker.version = value
    assert tracker.version == 0 and len(tracker.version_history) == 1


ENVIRONMENTS = {
    "no batch": lambda: Counting(None),
    "batch": lambda: Counting(3),
    "lazy": lambda: Counting(3, lazy=True),
    "serial": lambda: SerialEnv(2, lambda: Counting(2)),
}


@pytest.mark.parametrize("make", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_specs_say_what_is_written(make):
    env = TransformedEnv(make(), PolicyVersion())
    check_env_specs(env)
    spec = env.observation_spec["policy_version"]
    for written in (env.reset(), env.step(policy(env.reset()))["next"]):
        column = written.get("policy_version")
        assert spec.shape == column.shape == env.batch_size
        assert spec.dtype == column.dtype == torch.int64


def test_an_environment_alone_writes_the_version_at_its_step():
    tracker = PolicyVersion()
    env = TransformedEnv(Counting(2), tracker)
    start = env.reset()
    tracker.increment_version()
    turn = env.step(policy(start))
    assert turn["policy_version"].tolist() == [0, 0]
    assert turn["next", "policy_version"].tolist() == [1, 1]


class TestSpan:
    def test_oldest_and_newest(self):
        assert PolicyVersion().span(batch_of(4, 3, 9)) == (3, 9)

    def test_versions_of_tokens_where_the_policy_reports_them(self):
        tokens = torch.tensor([[3, 3, 4], [5, 6, -1]])
        assert PolicyVersion().span(batch_of(3, 5, token_policy_version=tokens)) == (3, 6)

    def test_answers_without_a_token_have_their_own(self):
        tokens = torch.full((2, 3), -1)
        assert PolicyVersion().span(batch_of(3, 5, token_policy_version=tokens)) == (3, 5)

    def test_ragged_versions_of_tokens(self):
        rows = [
            TensorDict({("next", "policy_version"): v, "token_policy_version": torch.tensor(t)})
            for v, t in ((1, [1, 2]), (2, [2, 2, 7]))
        ]
        assert PolicyVersion().span(lazy_stack(rows)) == (1, 7)

    def test_a_batch_without_versions_is_refused(self):
        with pytest.raises(ValueError, match="batch: expected an entry 'policy_version', got none"):
            PolicyVersion().span(TensorDict(batch_size=(2,)))
