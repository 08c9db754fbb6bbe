"""One tensor as several arguments of an op, as one weight for both heads is, compiled."""

from __future__ import annotations

import pytest
import torch

from fusedrl import (
    exact_kl,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    token_kl,
)

HIDDEN, WEIGHT = torch.linspace(0, 7, 60).sin().view(6, 10), torch.linspace(2, 9, 90).sin()
WEIGHT, SQUARE = WEIGHT.view(9, 10), torch.linspace(0, 5, 36).cos().view(6, 6)
LOG_PROBS, SLOPES = torch.linspace(-3, -1, 6), torch.linspace(1, 2, 6)
IDS = torch.tensor([[0, 4, 2], [1, -1, 5], [5, 2, 0], [3, 4, 1], [0, 1, 2], [4, 3, -1]])


def policy_loss(hidden, weight):
    old = (hidden[:, 0] - 3).detach()
    columns = {"old_log_probs": old, "ref_log_probs": old, "rollout_log_probs": old}
    options = {"clip": 0.9, "kl_coeff": 0.1, "importance": {"high": 2.0}}
    tokens = IDS[:, 0]
    return linear_policy_loss(hidden, weight, tokens, SLOPES, **columns, **options).loss


# What has a value a token, or one in all, of the tensors that are differentiated.
CASES = {
    "linear_exact_kl, one weight": (
        lambda h, w: linear_exact_kl(h, w, h.flip(0), w, direction="jensen_shannon").kl,
        (HIDDEN, WEIGHT),
    ),
    "linear_exact_kl, one hidden state": (
        lambda h, w: linear_exact_kl(h, w, h, w.flip(0)).kl,
        (HIDDEN, WEIGHT),
    ),
    "linear_exact_kl, one bias": (
        lambda h, w, b: linear_exact_kl(h, w, h.flip(0), w.flip(0), bias=b, ref_bias=b).kl,
        (HIDDEN, WEIGHT, WEIGHT[:, 0]),
    ),
    "exact_kl": (lambda x: exact_kl(x, x, direction="forward").kl, (SQUARE,)),
    "token_kl": (lambda x: token_kl(x, x.sin(), reward=x, coeff=0.1).reward, (LOG_PROBS,)),
    "token_kl, no difference": (lambda x: token_kl(x, x, estimator="k1").kl, (LOG_PROBS,)),
    "linear_policy_loss": (policy_loss, (HIDDEN, WEIGHT)),
    "linear_token_log_probs": (
        lambda x: linear_token_log_probs(x, x, IDS[:, 0]).log_probs,
        (SQUARE,),
    ),
}


def value_and_gradients(function, inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    upstream = torch.linspace(1, 2, out.numel()).view_as(out)
    return out.detach(), torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("case", CASES)
def test_compiled_to_one_graph(case):
    function, inputs = CASES[case]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found, expected = (value_and_gradients(f, inputs) for f in (compiled, function))
    torch.testing.assert_close(found, expected)
