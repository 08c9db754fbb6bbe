"""What linear ops store for their backward pass: the same results, within a bound in bytes."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fusedrl import linear_exact_kl, linear_token_log_probs
from fusedrl.ops import _stored
from fusedrl.ops.exact_kl import DIRECTIONS

ROWS, CLASSES = 30, 5003
FLOATS = 5008 + 16 * (5008 // 16 % 2 == 0)  # of a row, in an odd number of cache lines
SHAPES = [{}, {"softcap": 3.0, "scale": 1.7}]


def head(width, dtype, bias):
    tensors = torch.randn(ROWS, width), torch.randn(CLASSES, width) / width**0.5
    leaves = [x.to(dtype).requires_grad_() for x in tensors]
    return [*leaves, torch.randn(CLASSES).to(dtype).requires_grad_() if bias else None]


def log_probs(heads, options):
    (hidden, weight, bias), _ = heads
    tokens = torch.arange(ROWS) * 131 % CLASSES
    return linear_token_log_probs(hidden, weight, tokens, bias=bias, **options).log_probs


def divergence(direction):
    def function(heads, options):
        (hidden, weight, bias), (ref_hidden, ref_weight, ref_bias) = heads
        ref_options = {"ref_" + name: 2 * value for name, value in options.items()}
        return linear_exact_kl(
            *(hidden, weight, ref_hidden, ref_weight),
            **{"bias": bias, "ref_bias": ref_bias, "direction": direction},
            **options,
            **ref_options,
        ).kl

    return function


OPS = {"log_probs": log_probs, **{d: divergence(d) for d in DIRECTIONS}}


def outcome(op, heads, options, most_bytes):
    """Values, gradients, and how many numbers of stored logits the graph holds."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with (
        mock.patch.object(_stored, "MOST_BYTES", most_bytes),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        out = op(heads, options)
    stored = sum(x.numel() for x in saved if x.ndim == 1 and x.numel() >= ROWS * CLASSES)
    leaves = [x for one in heads for x in one if x is not None]
    upstream = torch.linspace(-2, 1, ROWS)
    grads = [
        torch.autograd.grad(out, leaves, upstream, retain_graph=True, allow_unused=True)
        for _ in range(2)
    ]
    return out.detach(), *grads, stored


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPS)
def test_the_same_as_multiplied_again(name, dtype, bias, shape):
    """And once more from the same graph: the backward pass leaves what is stored as it is."""
    heads = head(16, dtype, bias), head(24, dtype, bias)
    values, grads, again, stored = outcome(OPS[name], heads, shape, 1 << 30)
    want, want_grads, _, none = outcome(OPS[name], heads, shape, 0)
    assert stored == ROWS * FLOATS * (1 if name == "log_probs" else 2)
    assert none == 0
    assert torch.equal(values, want)
    for got, twice, other in zip(grads, again, want_grads, strict=True):
        assert (got is None) == (other is None)
        if got is not None:
            assert torch.equal(got, twice)
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPS)
def test_all_of_them_or_none(name):
    """The bound holds for both heads of an op together."""
    heads = head(16, torch.float32, False), head(24, torch.float32, False)
    count = 1 if name == "log_probs" else 2
    need = 4 * count * ROWS * FLOATS
    assert outcome(OPS[name], heads, {}, need)[-1] == count * ROWS * FLOATS
    assert outcome(OPS[name], heads, {}, need - 1)[-1] == 0
