"""token_kl by its compiled kernels."""

from __future__ import annotations

import itertools

import torch
from ptx.values import DTYPES, TOLERANCE

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS


def compare(dtype, estimator, reward_alone, offsets, mask, nan, spread=1.0):
    """KL, reward and gradient of more tokens than all blocks have threads."""
    p, q = (spread * torch.randn(2, 900)).to(dtype).unbind()
    p[5] = torch.nan
    reward = torch.randn(900 if offsets is None else len(offsets) - 1).to(dtype)
    results = []
    for impl, kind in (("cpu", dtype), ("reference", torch.float64)):
        leaf, known, given = (x.detach().to(kind) for x in (p, q, reward))
        leaf.requires_grad_()
        out = token_kl(
            leaf, known, mask, offsets=offsets, reward=given, coeff=0.3, estimator=estimator,
            nan=nan, impl=impl,
        )  # fmt: skip
        (out.reward if reward_alone else out.kl + out.reward).sum().backward()
        results.append((*out, leaf.grad))
    for mine, want in zip(*results, strict=True):
        tol = TOLERANCE.get(dtype, 1e-12) * spread
        torch.testing.assert_close(
            mine.double(), want.to(dtype).double(), rtol=2 * tol, atol=2 * tol, equal_nan=True
        )


def check_estimators():
    """Every estimator, with mask, missing values, gradients and broadcast rewards."""
    offsets, mask = torch.tensor([0, 100, 100, 900]), torch.rand(900) < 0.7
    mask[5] = True
    kinds = itertools.product([torch.float64, *DTYPES], ESTIMATORS, [False, True])
    for dtype, estimator, reward_alone in kinds:
        compare(dtype, estimator, reward_alone, offsets, mask, "missing")
        compare(dtype, estimator, reward_alone, None, None, "propagate")


def check_unlikely_tokens():
    """Ratios from 0 to infinity, missing values without a mask."""
    for dtype, estimator in itertools.product([torch.float64, *DTYPES], ESTIMATORS):
        compare(dtype, estimator, False, None, None, "missing", spread=12.0)
