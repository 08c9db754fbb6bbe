"""The wrapper by which every op takes nested tensors: what it hides, and what it must not."""

from __future__ import annotations

import inspect

import pytest
import torch

import fusedrl
from fusedrl import linear_policy_loss, token_kl

OPS = (
    "exact_kl",
    "importance_weights",
    "linear_exact_kl",
    "linear_policy_loss",
    "linear_token_log_probs",
    "token_kl",
    "token_log_probs",
)


@pytest.mark.parametrize("op", OPS)
def test_the_signature_is_the_ops_own(op):
    """Help and editors show the arguments, none of which has become ``*args``."""
    kinds = {x.kind for x in inspect.signature(getattr(fusedrl, op)).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("op", OPS)
def test_arguments_that_no_op_has_are_refused(op):
    nested = torch.nested.nested_tensor([torch.zeros(2, 3)], layout=torch.jagged)
    with pytest.raises(TypeError, match=rf"{op}\(\) .*nonsense"):
        getattr(fusedrl, op)(*[nested] * 5, nonsense=1)


# Two sequences and two tokens: [B] values could be taken for one a token.
OFFSETS = torch.tensor([0, 0, 2])


def nested(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, OFFSETS)


def test_advantages_of_sequences_are_not_those_of_tokens():
    hidden, weight, tokens = torch.randn(2, 4), torch.randn(7, 4), torch.tensor([1, 5])
    advantages = torch.tensor([9.0, -2.0])  # the first is of a sequence without a token
    ours = linear_policy_loss(nested(hidden), weight, nested(tokens), advantages)
    spread = advantages[None, [1, 1]]
    expected = linear_policy_loss(hidden, weight, tokens, spread, offsets=OFFSETS)
    assert torch.equal(ours.loss, expected.loss)


def test_rewards_of_sequences_are_not_those_of_tokens():
    p, q = torch.randn(2, 2)
    kl, reward = token_kl(nested(p), nested(q), reward=torch.tensor([9.0, -2.0]))
    assert torch.equal(reward.values(), -2.0 - kl.values())


def test_the_first_argument_may_be_named():
    p, q = torch.randn(2, 2)
    kl = token_kl(ref_log_probs=nested(q), log_probs=nested(p)).kl
    assert torch.equal(kl.values(), p - q)
