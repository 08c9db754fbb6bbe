"""What ops save for the backward pass, where saved-tensor hooks give back something else."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fusedrl import (
    exact_kl,
    linear_exact_kl,
    linear_policy_loss,
    linear_token_log_probs,
    linear_top_k_kl,
    token_kl,
    token_log_probs,
    top_k_kl,
)
from fusedrl.ops.linear_policy_loss.losses import RECIPES

ROWS, CLASSES, WIDTH = 12, 40, 8
TOKENS = torch.arange(ROWS) * 7 % CLASSES
IDS = torch.stack((TOKENS, (TOKENS + 3) % CLASSES), 1)
KNOWN = torch.full(IDS.shape, -2.0)


def policy_loss(hidden, weight):
    advantages = torch.linspace(-2, 1, ROWS)
    return linear_policy_loss(
        hidden,
        weight,
        TOKENS,
        None,
        advantages,
        kl_coeff=0.1,
        entropy_coeff=0.1,
        ref_log_probs=torch.full((ROWS,), -3.0),
    ).loss


def products(hidden, weight):
    return hidden @ weight.T


OPS = {
    "token_log_probs": lambda h, w: token_log_probs(products(h, w), TOKENS),
    "exact_kl": lambda h, w: exact_kl(products(h, w), products(w[:ROWS], w)),
    "top_k_kl": lambda h, w: top_k_kl(products(h, w), IDS, KNOWN),
    "token_kl": lambda h, w: token_kl(products(h, w), products(w[:ROWS], w), estimator="k3"),
    "linear_token_log_probs": lambda h, w: linear_token_log_probs(h, w, TOKENS),
    "linear_exact_kl": lambda h, w: linear_exact_kl(h, w, h.flip(0), w),
    "linear_top_k_kl": lambda h, w: linear_top_k_kl(h, w, IDS, KNOWN),
    "linear_policy_loss": policy_loss,
}


def same(tensor):
    return tensor


def in_columns(tensor):
    """The values, one column behind the other."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def apart(tensor):
    """The values, each with room behind it."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def gradients(op, dtype, unpack=same):
    generator = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(n, WIDTH, generator=generator).to(dtype).requires_grad_()
        for n in (ROWS, CLASSES)
    ]
    with saved_tensors_hooks(same, unpack):
        value = op(*leaves)
        upstream = torch.linspace(1, 2, value.numel()).view_as(value).to(value.dtype)
        return torch.autograd.grad(value, leaves, upstream)


@pytest.mark.parametrize("unpack", [in_columns, apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_another_memory_layout_changes_no_gradient(op, dtype, unpack):
    found, expected = gradients(OPS[op], dtype, unpack), gradients(OPS[op], dtype)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def half(tensor):
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def one_less(tensor):
    return tensor[1:] if tensor.shape in ((ROWS, WIDTH), (ROWS, CLASSES)) else tensor


@pytest.mark.parametrize("unpack", [half, one_less])
@pytest.mark.parametrize("op", OPS)
def test_another_dtype_or_shape_is_refused(op, unpack):
    with pytest.raises(RuntimeError, match=r"saved tensors: expected torch\.float32 .*; let the "):
        gradients(OPS[op], torch.float32, unpack)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("op", OPS)
def test_no_gradient_is_what_was_saved(op, dtype):
    """As of a caller that clips the gradients of a graph it keeps, in place."""
    leaves = [torch.linspace(-1, 2, n * WIDTH).view(n, WIDTH) for n in (ROWS, CLASSES)]
    leaves = [x.to(dtype).requires_grad_() for x in leaves]
    total = OPS[op](*leaves).sum()
    expected = [x.clone() for x in torch.autograd.grad(total, leaves, retain_graph=True)]
    for keeps in (True, True, False):
        found = torch.autograd.grad(total, leaves, retain_graph=keeps)
        assert all(map(torch.equal, found, expected))
        for grad in found:
            grad.zero_()


@pytest.mark.parametrize("loss", RECIPES)
def test_hooks_get_what_the_backward_pass_needs_and_nothing_else(loss):
    """Tensors of a pass within the forward pass would make a checkpoint run once more."""
    runs, hidden = [], torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def segment(hidden):
        runs.append(loss)
        return linear_policy_loss(
            *(hidden, weight, TOKENS, None, torch.linspace(-2, 1, ROWS)), loss=loss,
            old_log_probs=torch.full((ROWS,), -3.0), normalizer=5.0,
            ref_log_probs=torch.full((ROWS,), -3.0), kl_coeff=0.1,
        ).loss  # fmt: skip

    seen = []
    with saved_tensors_hooks(lambda x: seen.append(x.shape) or x, same):
        segment(hidden).backward()
    assert seen.count((ROWS,)) == 0
    runs.clear()
    checkpoint(segment, hidden, use_reentrant=False).backward()
    assert len(runs) == 2
