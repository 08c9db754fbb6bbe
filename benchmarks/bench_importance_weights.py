"""importance_weights: weights and statistics of packed and padded batches, beside plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedrl import importance_weights, ragged

from .harness import Case

GOAL = 3.0  # least speed-up over plain torch
WORK = 4 + 4 + 1 + 4  # bytes a token: policy, rollout and mask in, weight out
HIGH = 2.0


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Batches of completions, at the levels of tokens and of sequences."""
    sizes = ((64, 512),) if quick else ((64, 512), (256, 2048))
    for sequences, longest in sizes:
        batch = make_batch(sequences, longest, device)
        for level in ("token", "sequence"):
            yield padded_case(batch, level)
            yield packed_case(batch, level)


def make_batch(sequences: int, longest: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Padded log-probs of trainer and engine, bf16 rounding apart, and the mask."""
    generator = torch.Generator().manual_seed(sequences)
    rollout = -3 * torch.rand(sequences, longest, generator=generator)
    policy = rollout + 0.03 * torch.randn(sequences, longest, generator=generator)
    lengths = torch.randint(longest // 2, longest + 1, (sequences,), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    return policy.to(device), rollout.to(device), mask.to(device)


def padded_case(batch: tuple[Tensor, Tensor, Tensor], level: str) -> Case:
    """Rows of one length, plain torch's own form."""
    policy, rollout, mask = batch

    def plain_torch(_: Any) -> tuple[Tensor, ...]:
        return weigh_rows(policy, rollout, mask, level)

    def ours(_: Any) -> tuple[Tensor, ...]:
        weights, mismatch = importance_weights(policy, rollout, mask, level=level, high=HIGH)
        return weights, mismatch.k1, mismatch.k3, mismatch.ess, mismatch.max_ratio, mismatch.clipped

    def truth(_: Any) -> Tensor:
        return joined(weigh_rows(policy.double(), rollout.double(), mask, level))

    setting = f"{tuple(policy.shape)} padded, {level}"
    return make_case(setting, plain_torch, ours, truth, policy.numel())


def packed_case(batch: tuple[Tensor, Tensor, Tensor], level: str) -> Case:
    """The same tokens packed; plain torch adds up by index."""
    mask = batch[2]
    lengths = mask.sum(1)
    policy, rollout = (x[mask] for x in batch[:2])
    offsets = ragged.offsets_of(lengths)
    sequences = torch.repeat_interleave(lengths)

    def plain_torch(_: Any) -> tuple[Tensor, ...]:
        return weigh_packed(policy, rollout, sequences, len(lengths), level)

    def ours(_: Any) -> tuple[Tensor, ...]:
        weights, mismatch = importance_weights(
            policy, rollout, offsets=offsets, level=level, high=HIGH
        )
        return weights, mismatch.k1, mismatch.k3, mismatch.ess, mismatch.max_ratio, mismatch.clipped

    def truth(_: Any) -> Tensor:
        exact = weigh_packed(policy.double(), rollout.double(), sequences, len(lengths), level)
        return joined(exact)

    setting = f"{len(lengths)} x up to {mask.shape[1]} packed, {level}"
    return make_case(setting, plain_torch, ours, truth, policy.numel())


def make_case(setting: str, plain_torch: Any, ours: Any, truth: Any, tokens: int) -> Case:
    """Both contenders, whose answers are the weights and five statistics a sequence."""
    return Case(
        op="importance_weights",
        setting=setting,
        make_input=lambda: None,
        contenders={"torch": plain_torch, "fusedrl": ours},
        truth=truth,
        answer=joined,
        goals={"torch": GOAL},
        work=tokens * WORK,
        host_bound=True,
    )


def joined(results: tuple[Tensor, ...]) -> Tensor:
    """All answers in one tensor; effective sizes, which run to thousands, relative to their own."""
    weights, k1, k3, ess, largest, clipped = results
    return torch.cat([weights.flatten(), k1, k3, ess / 1024, largest, clipped])


def weigh_rows(p: Tensor, q: Tensor, mask: Tensor, level: str) -> tuple[Tensor, ...]:
    """Weights and statistics of padded rows in plain torch."""
    tokens = mask.sum(1)
    d = (p - q).masked_fill(~mask, 0)
    ratio = d.exp() if level == "token" else d.sum(1, keepdim=True).exp().expand_as(d)
    weights = ratio.clamp(max=HIGH) * mask
    ess = weights.sum(1).square() / weights.square().sum(1)
    k1, k3 = -d.sum(1) / tokens, (torch.expm1(d) - d).sum(1) / tokens
    clipped = ((ratio > HIGH) & mask).sum(1) / tokens
    return weights, k1, k3, ess, ratio.masked_fill(~mask, 0).amax(1), clipped


def weigh_packed(
    p: Tensor, q: Tensor, sequences: Tensor, count: int, level: str
) -> tuple[Tensor, ...]:
    """The same of packed tokens, of which each knows its sequence."""

    def total(values: Tensor) -> Tensor:
        return p.new_zeros(count).index_add_(0, sequences, values.to(p.dtype))

    d = p - q
    tokens = total(torch.ones_like(d))
    ratio = d.exp() if level == "token" else total(d).exp()[sequences]
    weights = ratio.clamp(max=HIGH)
    ess = total(weights).square() / total(weights.square())
    k1, k3 = -total(d) / tokens, total(torch.expm1(d) - d) / tokens
    largest = p.new_zeros(count).scatter_reduce_(0, sequences, ratio, "amax")
    return weights, k1, k3, ess, largest, total(ratio > HIGH) / tokens
