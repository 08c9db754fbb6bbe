"""The linear ops on values at the ends of what a dtype holds, and on shapes that fill no vector."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_token_log_probs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients(hidden, weight, tokens, upstream, impl):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = linear_token_log_probs(*leaves, tokens, impl=impl).log_probs
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "classes", "width"), [(1, 3, 1), (15, 33, 3), (29, 1057, 513)])
def test_odd_shapes(dtype, rows, classes, width):
    """A row alone, the tails of blocks, panels and pairs, and a second piece of the depth."""
    hidden, weight = torch.randn(rows, width), torch.randn(classes, width) / width**0.5
    tokens, upstream = torch.randint(0, classes, (rows,)), torch.randn(rows)
    args = hidden.to(dtype), weight.to(dtype), tokens, upstream
    exact = gradients(args[0].double(), args[1].double(), tokens, upstream.double(), "reference")
    eps = torch.finfo(dtype).eps
    for got, want, tol in zip(gradients(*args, "cpu"), exact, (1e-5, eps, eps), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tol, atol=3e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(dtype, value):
    hidden, weight = torch.randn(20, 40).to(dtype), torch.randn(600, 40).to(dtype)
    tokens, upstream = torch.randint(0, 600, (20,)), torch.randn(20)
    clean = gradients(hidden, weight, tokens, upstream, "cpu")
    hidden[3, 7] = value
    broken = gradients(hidden, weight, tokens, upstream, "cpu")
    others = torch.arange(20) != 3
    assert not broken[0][3].isfinite()
    assert torch.equal(broken[0][others], clean[0][others])
    assert torch.equal(broken[1][others], clean[1][others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upstream", [torch.inf, torch.nan, 3e38, 1e-30])
def test_upstream_gradients_at_the_ends_of_float32(dtype, upstream):
    hidden, weight = torch.randn(6, 8).to(dtype), torch.randn(50, 8).to(dtype)
    tokens, grads = torch.randint(0, 50, (6,)), torch.randn(6)
    grads[2] = upstream
    found = gradients(hidden, weight, tokens, grads, "cpu")
    reference = gradients(hidden, weight, tokens, grads, "reference")
    for got, want in zip(found, reference, strict=True):
        assert torch.equal(got.isnan() | got.isinf(), want.isnan() | want.isinf())
    torch.testing.assert_close(found[1][:2], reference[1][:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_logits_between_the_largest_bfloat16_and_infinity(dtype):
    """With 2000 classes of about equal probability the target's keeps 0.9995 of the upstream."""
    hidden, weight = torch.ones(1, 1, dtype=dtype), torch.full((2000, 1), 0.25, dtype=dtype)
    weight[0] = 0.125
    upstream = torch.tensor([torch.finfo(torch.float32).max])
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    out = linear_token_log_probs(*leaves, torch.zeros(1, dtype=torch.int64)).log_probs
    (of_hidden,) = torch.autograd.grad(out, leaves[:1], upstream)
    expected = torch.full((1, 1), -0.125 * upstream.item()).to(dtype)
    torch.testing.assert_close(of_hidden, expected, rtol=1e-2, atol=0)
