"""token_kl with CUDA threads by turns."""

from __future__ import annotations

import itertools

import torch
from values import DTYPES

from fusedrl import token_kl
from fusedrl.ops.token_kl import ESTIMATORS


def check_estimators():
    """Every estimator, with mask, missing values, gradients and broadcast rewards."""
    for dtype, estimator, reward_alone in itertools.product(
        [torch.float32, torch.float64], ESTIMATORS, [False, True]
    ):
        p, q = torch.randn(2, 700).to(dtype).unbind()
        p[5], reward = torch.nan, torch.randn(3).to(dtype)
        offsets, mask = torch.tensor([0, 100, 100, 700]), torch.rand(700) < 0.7
        results = []
        for impl in ("cpu", "reference"):
            leaf = p.clone().requires_grad_()
            out = token_kl(
                leaf, q, mask, offsets=offsets, reward=reward, coeff=0.3, estimator=estimator,
                nan="missing", impl=impl,
            )  # fmt: skip
            (out.reward if reward_alone else out.kl + out.reward).sum().backward()
            results.append((*out, leaf.grad))
        for mine, want in zip(*results, strict=True):
            torch.testing.assert_close(mine, want)


def check_lists():
    """Samples that lie apart, in more than one launch: empty ones, masks, one-value rewards."""
    coeff = torch.tensor(0.3, dtype=torch.float64)
    lengths = [*torch.randint(0, 9, (900,)).tolist(), 0, 5000, 1, 0]
    lengths[100:870] = [0] * 770  # most of the first launch and a part of the second
    for dtype, kinds in itertools.product([*DTYPES, torch.float64], ("none", "tokens", "mixed")):
        p, q = ([torch.randn(n + 1).to(dtype)[1:] for n in lengths] for _ in range(2))
        p[-3][4000], mask = torch.nan, [torch.rand(n) < 0.7 for n in lengths]
        of_token = [torch.randn(n, 1).to(dtype) for n in lengths]
        of_sample = [torch.randn(1).to(dtype) for _ in lengths]
        reward = {"none": [], "tokens": of_token, "mixed": of_token[:450] + of_sample[450:]}[kinds]
        if kinds == "none":
            mask = []
        ours = torch.ops.fusedrl.token_kl_list(p, q, mask, reward, coeff, 2, True)
        spread = [r.reshape(-1).expand(n) for r, n in zip(reward, lengths, strict=bool(reward))]
        want = token_kl(
            torch.cat(p), torch.cat(q), torch.cat(mask) if mask else None, estimator="k3",
            reward=torch.cat(spread) if reward else None, coeff=0.3, nan="missing",
            impl="reference",
        )  # fmt: skip
        if not reward:
            want = (want, want[:0])
        for mine, exact in zip(ours, want, strict=True):
            torch.testing.assert_close(mine, exact)
