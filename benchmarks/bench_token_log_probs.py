"""token_log_probs: log-probs of tokens from full logits, beside torchrl's and torch's ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusedrl import token_log_probs

from .harness import Case

# (batch, tokens a row, classes): 256 x 151936 is a Qwen vocabulary, 512 x 32000 a Llama-2 one.
SHAPES = [(4, 64, 151936), (4, 128, 32000)]
DTYPES = [torch.float32, torch.bfloat16]
GPU_SHAPE = (8, 1024, 151936)  # in bfloat16, all kept
GPU_FRACTION = 0.85  # least share there of what a copy moves a second
# Kept share of the tokens -> least speed-up over the reference path and over torch.compile.
GOALS = {1.0: (8.0, 2.0), 0.3: (20.0, 4.0)}


class Batch(NamedTuple):
    """Padded logits, their tokens, and the tokens to score."""

    logits: Tensor
    tokens: Tensor
    mask: Tensor


def reference_path(batch: Batch) -> Tensor:
    """A shifted copy of the logits, cross entropy over all of it, and the mask last."""
    logits, tokens, mask = batch
    shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
    losses = F.cross_entropy(shifted.flatten(0, 1), tokens.flatten(), reduction="none")
    log_probs = -losses.view(tokens.shape)
    log_probs[:, 0] = 0
    return log_probs.masked_fill(~mask, 0.0)


def log_softmax_gather(batch: Batch) -> Tensor:
    """What torch.compile is given: a log_softmax in float32 and a gather."""
    logits, tokens, mask = batch
    log_softmax = torch.log_softmax(logits[:, :-1].float(), -1)
    log_probs = log_softmax.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return F.pad(log_probs, (1, 0)).masked_fill(~mask, 0.0)


def truth(batch: Batch) -> Tensor:
    """The same in float64, a row at a time."""
    logits, tokens, mask = batch
    out = torch.zeros(tokens.shape, dtype=torch.float64, device=tokens.device)
    for b, t in mask.nonzero().tolist():
        if t > 0:
            row = logits[b, t - 1].double()
            out[b, t] = row[tokens[b, t]] - torch.logsumexp(row, 0)
    return out


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Forward on every shape, dtype and mask; then forward and backward on the smaller shape."""
    if device == "cuda" and not quick:
        yield forward_case(device, GPU_SHAPE, torch.bfloat16, 1.0, GPU_FRACTION)
    for shape in SHAPES[1:] if quick else SHAPES:
        for dtype in DTYPES:
            for keep in GOALS:
                yield forward_case(device, shape, dtype, keep)
    yield from backward_cases(device)


def forward_case(
    device: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    keep: float,
    least_fraction: float | None = None,
) -> Case:
    """Log-probs of the kept tokens; the work is to read their rows once."""
    batch = make_batch(device, shape, dtype, keep)
    over_reference, over_compile = GOALS[keep]
    return Case(
        op="token_log_probs",
        setting=_setting(shape, dtype, keep),
        make_input=lambda: batch,
        contenders={
            "torchrl path": reference_path,
            "torch.compile": torch.compile(log_softmax_gather, dynamic=False),
            "fusedrl": lambda b: token_log_probs(*b, shift=True).log_probs,
            "fusedrl + entropy": lambda b: token_log_probs(*b, shift=True, entropy=True).log_probs,
        },
        truth=truth,
        goals={"torchrl path": over_reference, "torch.compile": over_compile},
        work=kept_rows(batch) * shape[-1] * dtype.itemsize,
        least_fraction=least_fraction,
    )


def make_batch(device: str, shape: tuple[int, int, int], dtype: torch.dtype, keep: float) -> Batch:
    """Normal logits, and each token kept with probability ``keep``."""
    logits = torch.randn(shape, device=device, dtype=dtype)
    tokens = torch.randint(0, shape[-1], shape[:-1], device=device)
    return Batch(logits, tokens, torch.rand(shape[:-1], device=device) < keep)


def kept_rows(batch: Batch) -> int:
    """Rows of the logits that a kept token reads: not those of the first tokens."""
    return int(batch.mask[:, 1:].sum())


def backward_cases(device: str) -> Iterator[Case]:
    """The gradient of the mean log-prob with respect to the logits."""
    shape = SHAPES[1]
    for dtype in DTYPES:
        for keep in GOALS:
            batch = make_batch(device, shape, dtype, keep)

            def gradient(path, batch):
                leaf = batch.logits.detach().requires_grad_()
                path(batch._replace(logits=leaf)).mean().backward()
                return leaf.grad

            def exact(batch):
                leaf = batch.logits.double()
                return gradient(log_softmax_gather_exact, batch._replace(logits=leaf))

            # Forward and backward each read the kept rows; the gradient is as large as the logits.
            moved = (2 * kept_rows(batch) + shape[0] * shape[1]) * shape[2] * dtype.itemsize
            yield Case(
                op="token_log_probs, forward + backward",
                setting=_setting(shape, dtype, keep),
                make_input=lambda b=batch: b,
                contenders={
                    "torchrl path": lambda b: gradient(reference_path, b),
                    "log_softmax + gather": lambda b: gradient(log_softmax_gather, b),
                    "fusedrl": lambda b: gradient(
                        lambda x: token_log_probs(*x, shift=True).log_probs, b
                    ),
                },
                truth=exact,
                work=moved,
            )


def log_softmax_gather_exact(batch: Batch) -> Tensor:
    """The float64 definition, through the op's own reference."""
    return token_log_probs(*batch, shift=True, impl="reference").log_probs


def _setting(shape: tuple[int, ...], dtype: torch.dtype, keep: float) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"[{shape[0] * shape[1]}, {shape[2]}] {name}, {keep:.0%} kept"
