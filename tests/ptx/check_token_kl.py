"""token_kl by its compiled kernels."""

from __future__ import annotations

import itertools

import torch
from ptx.values import DTYPES, TOLERANCE

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS


def check_estimators():
    """Every estimator, with mask, missing values, gradients and broadcast rewards."""
    for dtype, estimator, reward_alone in itertools.product(
        [torch.float64, *DTYPES], ESTIMATORS, [False, True]
    ):
        p, q = torch.randn(2, 700).to(dtype).unbind()
        p[5], reward = torch.nan, torch.randn(3).to(dtype)
        offsets, mask = torch.tensor([0, 100, 100, 700]), torch.rand(700) < 0.7
        results = []
        for impl, kind in (("cpu", dtype), ("reference", torch.float64)):
            leaf, known, given = (x.detach().to(kind) for x in (p, q, reward))
            leaf.requires_grad_()
            out = token_kl(
                leaf, known, mask, offsets=offsets, reward=given, coeff=0.3, estimator=estimator,
                nan="missing", impl=impl,
            )  # fmt: skip
            (out.reward if reward_alone else out.kl + out.reward).sum().backward()
            results.append((*out, leaf.grad))
        for mine, want in zip(*results, strict=True):
            tol = TOLERANCE.get(dtype, 1e-12)
            torch.testing.assert_close(mine.double(), want, rtol=2 * tol, atol=2 * tol)
