"""exact_kl: the KL divergence of two rows of logits over the whole vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from . import peers
from .harness import Case

SHAPES = [(256, 151936), (512, 32000)]  # rows, classes
DTYPES = [torch.float32, torch.bfloat16]
GPU_SHAPES = [(4096, 151936)]  # in bfloat16
DIRECTIONS = ("reverse", "forward", "jensen_shannon")
GOAL = 5.0  # least speed-up over two log_softmaxes and a sum
ROWS = 256  # at a time, in float64

Pair = tuple[Tensor, Tensor]


def divergence(log_p: Tensor, log_q: Tensor, direction: str) -> Tensor:
    """``reverse`` is KL(p || q) and ``forward`` KL(q || p), of normalised log-probs."""
    if direction == "reverse":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if direction == "forward":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    to_middle = log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * to_middle.sum(-1)


def plain_torch(pair: Pair, direction: str) -> Tensor:
    """Two log_softmaxes in float32 and a sum."""
    log_p, log_q = (torch.log_softmax(x.float(), -1) for x in pair)
    return divergence(log_p, log_q, direction)


def truth(pair: Pair, direction: str) -> Tensor:
    """The same in float64, some rows at a time."""
    blocks = zip(*(x.split(ROWS) for x in pair), strict=True)
    return torch.cat(
        [
            divergence(*(torch.log_softmax(x.double(), -1) for x in block), direction)
            for block in blocks
        ]
    )


def make_pair(device: str, shape: tuple[int, int], dtype: torch.dtype) -> Pair:
    """A policy of normal logits, and a reference near it."""
    logits = torch.randn(shape, device=device, dtype=dtype)
    return logits, logits + 0.3 * torch.randn(shape, device=device, dtype=dtype)


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Every shape, dtype and direction."""
    if device == "cuda" and not quick:
        settings = [(shape, torch.bfloat16) for shape in GPU_SHAPES]
    else:
        settings = [(s, dtype) for s in (SHAPES[1:] if quick else SHAPES) for dtype in DTYPES]
    for shape, dtype in settings:
        pair = make_pair(device, shape, dtype)
        for direction in DIRECTIONS:
            yield one_case(pair, direction, usable)


def one_case(pair: Pair, direction: str, usable: set[str]) -> Case:
    """One direction; the work is to read both rows once."""
    from fusedrl import exact_kl  # pyright: ignore[reportAttributeAccessIssue]

    compiled = torch.compile(plain_torch, dynamic=False)
    timed_only = {}
    if peers.LIGER in usable:  # it gives the mean over rows only
        timed_only["log_softmax + Liger"] = lambda pair: peers.liger_mean_kl(*pair, direction)
    rows, classes = pair[0].shape
    dtype = str(pair[0].dtype).removeprefix("torch.")
    return Case(
        op="exact_kl",
        setting=f"[{rows}, {classes}] {dtype}, {direction}",
        make_input=lambda: pair,
        contenders={
            "two log_softmax + sum": lambda pair: plain_torch(pair, direction),
            "torch.compile": lambda pair: compiled(pair, direction),
            "fusedrl": lambda pair: exact_kl(*pair, direction=direction).kl,
        },
        timed_only=timed_only,
        truth=lambda pair: truth(pair, direction),
        goals={"two log_softmax + sum": GOAL},
        work=2 * pair[0].numel() * pair[0].element_size(),
    )
