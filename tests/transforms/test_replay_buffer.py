"""The KL transforms in a replay buffer: on what is written, or on what is sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import LazyStackStorage, ListStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import Compose

from fusedrl import KLComputation, KLRewardTransform, RetrieveKL

from .dialogs import GEN, LENGTHS, REF, assert_rows_equal, conversations, rows
from .test_kl_reward import samples, with_reward

COEFF = 0.3


def answers() -> TensorDictBase:
    """Tokens and the policy's log-probs, as a policy that generates leaves them."""
    return lazy_stack(with_reward(samples(), per_token=False))


def chats() -> TensorDictBase:
    """Conversations with a reward each."""
    data = conversations(stacked=True, with_next=True)
    for row in data.unbind(0):
        row["next"].set("reward", torch.ones(1, 1))
    return data


def scored() -> TensorDictBase:
    """Log-probs of both models, with a reward each."""
    torch.manual_seed(4)
    columns = [{GEN: -torch.rand(n), REF: -torch.rand(n)} for n in LENGTHS]
    return lazy_stack(
        [TensorDict(next=TensorDict({**row, "reward": torch.ones(1, 1)})) for row in columns]
    )


@pytest.fixture(params=["KLRewardTransform", "RetrieveKL", "KLComputation"])
def penalty(request, wrap, reference_model, policy, reference) -> Any:
    """A transform that penalises, and a function that makes data for it, always the same."""
    if request.param == "KLRewardTransform":
        model = wrap(reference_model, input_mode="tokens")
        return KLRewardTransform(model, coef=COEFF), answers
    if request.param == "RetrieveKL":
        return RetrieveKL(policy(), reference(), coeff=COEFF), chats
    return KLComputation(coeff=COEFF), scored


def buffer_of(transform: Any, *, invert: bool, storage: Any = LazyStackStorage) -> ReplayBuffer:
    """A buffer that samples its elements in their order."""
    buffer = ReplayBuffer(
        storage=storage(10),
        sampler=SamplerWithoutReplacement(shuffle=False),
        batch_size=len(LENGTHS),
        collate_fn=lazy_stack if storage is ListStorage else None,
    )
    return buffer.append_transform(transform, invert=invert)


def assert_penalised(data: TensorDictBase, before: TensorDictBase) -> None:
    """Once, by the KL that is beside the reward."""
    kl = [row.reshape(-1, 1) for row in rows(data["next"], "kl_penalty")]
    assert all(row.abs().max() > 0.05 for row in kl)
    rewards = rows(before["next"], "reward")
    wanted = [reward - COEFF * row for reward, row in zip(rewards, kl, strict=True)]
    assert_rows_equal(rows(data["next"], "reward"), wanted)


@pytest.mark.parametrize("inside", [False, True])
def test_what_is_written_is_penalised_once(penalty, inside):
    transform, make = penalty
    buffer = buffer_of(Compose(transform) if inside else transform, invert=True)
    data = make()
    buffer.extend(data)
    assert "kl_penalty" not in data["next"], "the caller's data are the caller's"
    for _ in range(2):
        assert_penalised(buffer.sample(), make())


@pytest.mark.parametrize("storage", [LazyStackStorage, ListStorage])
def test_what_is_sampled_is_penalised_as_it_was_stored(penalty, storage):
    """torchrl's transforms write into the storage: the next sampling penalises once more."""
    transform, make = penalty
    buffer = buffer_of(transform, invert=False, storage=storage)
    buffer.extend(make())
    for _ in range(3):
        assert_penalised(buffer.sample(), make())
    stored = lazy_stack([buffer.storage[index] for index in range(len(LENGTHS))])
    assert "kl_penalty" not in stored["next"]
    assert_rows_equal(rows(stored["next"], "reward"), rows(make()["next"], "reward"))
