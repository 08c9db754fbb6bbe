"""What ops save for the backward pass, where saved-tensor hooks give back something else."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fusedrl import linear_policy_loss
from fusedrl.ops.linear_policy_loss.losses import RECIPES

from .every_case import DIFFERENTIABLE, EVERY, OF_KERNELS, gradients, leaves_of

ROWS, CLASSES, WIDTH = 12, 40, 8
TOKENS = torch.arange(ROWS) * 7 % CLASSES


def same(tensor):
    return tensor


def in_columns(tensor):
    """The values, one column behind the other."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def apart(tensor):
    """The values, each with room behind it."""
    return torch.stack((tensor, tensor), -1)[..., 0]


def unpacked_as(case, dtype, unpack=same):
    leaves = leaves_of(case, dtype)
    with saved_tensors_hooks(same, unpack):
        return gradients(case.call(leaves), leaves)


@pytest.mark.parametrize("unpack", [in_columns, apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_another_memory_layout_changes_no_gradient(name, dtype, unpack):
    case = EVERY[name]
    expected = unpacked_as(case, dtype)
    torch.testing.assert_close(unpacked_as(case, dtype, unpack), expected)


def half(tensor):
    return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor


def one_less(tensor):
    return tensor[1:] if tensor.dim() else tensor


@pytest.mark.parametrize("unpack", [half, one_less])
@pytest.mark.parametrize("name", OF_KERNELS)
def test_another_dtype_or_shape_is_refused(name, unpack):
    # Functions of torch in the graph, as of `renormalize`, say it in their own words.
    with pytest.raises(
        RuntimeError, match=r"saved tensors: expected torch\.\w+ .*; let the |scalar|size of tensor"
    ):
        unpacked_as(EVERY[name], torch.float32, unpack)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_no_gradient_is_what_was_saved(name, dtype):
    """As of a caller that clips the gradients of a graph it keeps, in place."""
    case, leaves = EVERY[name], leaves_of(EVERY[name], dtype)
    results = case.call(leaves)
    expected = [x.clone() for x in gradients(results, leaves, retain_graph=True)]
    for keeps in (True, True, False):
        grads = gradients(results, leaves, retain_graph=keeps)
        assert all(map(torch.equal, grads, expected))
        for grad in grads:
            grad.zero_()


@pytest.mark.parametrize("loss", RECIPES)
def test_hooks_get_what_the_backward_pass_needs_and_nothing_else(loss):
    """Tensors of a pass within the forward pass would make a checkpoint run once more."""
    runs, hidden = [], torch.randn(ROWS, WIDTH, requires_grad=True)
    weight = torch.randn(CLASSES, WIDTH, requires_grad=True)

    def segment(hidden):
        runs.append(loss)
        return linear_policy_loss(
            *(hidden, weight, TOKENS, torch.linspace(-2, 1, ROWS), None), loss=loss,
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
