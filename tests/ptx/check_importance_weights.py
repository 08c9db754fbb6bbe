"""importance_weights by its compiled kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from ptx.values import DTYPES

from fusedrl import importance_weights
from fusedrl.ops.importance_weights import LEVELS, MODES


def compare(p, q, *args, **options):
    """Weights and sums beside the reference's on the same values in float64."""
    ours = importance_weights(p, q, *args, impl="cpu", **options)
    exact = importance_weights(p.double(), q.double(), *args, impl="reference", **options)
    close = {"rtol": 3e-6, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(ours.weights.double(), exact.weights, **close)
    for mine, want in zip(ours.mismatch, exact.mismatch, strict=True):
        torch.testing.assert_close(mine.double(), want.double(), **close)


def check_levels_and_modes():
    """More sequences than blocks, more tokens than threads, empty sequences and masked NaN."""
    lengths = [700, 0, 1, 255, 256, 257, 31, 0]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    count, options = sum(lengths), {"low": 0.72, "high": 1.41}
    for dtype, level, mode in itertools.product(DTYPES, LEVELS, MODES):
        q = -2 * torch.rand(count)
        p = (q + 0.1 * torch.randn(count)).to(dtype)
        mask = torch.rand(count) < 0.7
        p[~mask] = torch.nan
        compare(p, q.to(dtype), mask, offsets, level=level, mode=mode, **options)


def check_single_tokens():
    """Each the only one of its sequence, whose bits come unchanged from every lane and warp."""
    offsets, kept = torch.arange(0, 9 * 256, 256), 2 ** torch.arange(8)
    mask = torch.zeros(8, 256, dtype=torch.bool).scatter(1, kept[:, None], True).flatten()
    for dtype in DTYPES:
        p, q = (0.3 * torch.randn(2, 8 * 256)).to(dtype).unbind()
        ours = importance_weights(p, q, mask, offsets, impl="cpu")
        exact = importance_weights(p.double(), q.double(), mask, offsets, impl="reference")
        for mine, want in zip(ours.mismatch, exact.mismatch, strict=True):
            torch.testing.assert_close(mine.double(), want.double(), rtol=3e-7, atol=0)


def check_padded_and_missing():
    """Rows, one row, no rows; log-probs that are NaN or infinite."""
    for level, nan, rows in itertools.product(LEVELS, ("propagate", "missing"), (0, 1, 9)):
        p, q = (0.1 * torch.randn(2, rows, 77)).unbind()
        if rows:
            p[0, 5], q[-1, 7], q[-1, 9] = torch.nan, torch.nan, -torch.inf
        compare(p, q, level=level, nan=nan)
        compare(p, q, level=level, nan=nan, high=None)


def check_offsets():
    """Where they do not partition the tokens, nothing outside of these is touched."""
    p, bound = torch.zeros(8), torch.ones((), dtype=torch.float64)
    for bounds in ([0, 3, 1, 8], [0, 3, 4], [1, 8], [0, 9], [-1, 8]):
        offsets = torch.tensor(bounds)
        with pytest.raises(RuntimeError, match="offsets: expected non-decreasing values from 0 to"):
            torch.ops.fusedrl.importance_weights(p, p, None, offsets, bound, bound, 0, False, False)


def check_bits():
    """A sequence alone and in a batch, at another address."""
    p, q = torch.randn(2, 1300).unbind()
    offsets = torch.tensor([0, 1, 600, 1300])
    for level in LEVELS:
        batch = importance_weights(p, q, offsets=offsets, level=level, impl="cpu")
        own = [x[1:600].clone() for x in (p, q)]
        alone = importance_weights(*own, offsets=torch.tensor([0, 599]), level=level, impl="cpu")
        assert torch.equal(alone.weights, batch.weights[1:600])
        for mine, other in zip(alone.mismatch, batch.mismatch, strict=True):
            assert torch.equal(mine, other[1:2])
