"""Rows of the linear ops with batch_invariant: the same bits alone as in a batch."""

from __future__ import annotations

import pytest
import torch

from fusedrl import linear_exact_kl, linear_token_log_probs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS, CLASSES = 29, 300  # two full blocks of 14 rows and a row that has one of its own


def log_probs(hidden, weight, tokens, **options):
    out = linear_token_log_probs(
        hidden, weight, tokens, entropy=True, batch_invariant=True, **options
    )
    return out.log_probs + out.entropy


def divergence(hidden, weight, tokens, **options):
    ref_hidden = hidden.detach().roll(1, -1)
    return linear_exact_kl(hidden, weight, ref_hidden, weight, batch_invariant=True, **options).kl


@pytest.mark.parametrize("path", [log_probs, divergence])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*range(1, 36, 2), 64, 70, 513, 1100])
def test_a_row_alone_and_in_a_batch(path, dtype, width):
    """The depth of a product in one piece and in several, and a scale that rounds."""
    hidden = torch.randn(ROWS, width).to(dtype)
    weight = (torch.randn(CLASSES, width) / width**0.5).to(dtype)
    tokens, upstream = torch.randint(0, CLASSES, (ROWS,)), torch.randn(ROWS)

    def run(rows):
        leaf = hidden[rows].clone().requires_grad_()
        out = path(leaf, weight, tokens[rows], scale=0.7)
        return out.detach(), *torch.autograd.grad(out, leaf, upstream[rows])

    whole = run(slice(None))
    for i in range(ROWS):
        row = slice(i, i + 1)
        for got, want in zip(run(row), whole, strict=True):
            assert torch.equal(got, want[row]), i


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_of_weights_with_any_stride(dtype):
    """A width of 1 leaves the stride between columns undefined: it may be that of a row."""
    hidden, weight = torch.randn(3, 16).to(dtype), torch.randn(3000, 16).to(dtype)
    row = torch.randn(1, 3000).to(dtype)

    def run(column):
        ref_hidden = torch.ones(3, 1, dtype=dtype, requires_grad=True)
        out = linear_exact_kl(hidden, weight, ref_hidden, column, batch_invariant=True).kl
        return out.detach(), *torch.autograd.grad(out.sum(), ref_hidden)

    assert row.T.stride() == (1, 3000)
    for got, want in zip(run(row.T), run(row.view(3000, 1)), strict=True):
        assert torch.equal(got, want)
