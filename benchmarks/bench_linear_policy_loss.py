"""linear_policy_loss: a DAPO step from hidden states, beside three bare products, TRL and Liger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import peers
from .bench_linear_token_log_probs import sample_of
from .harness import Case

# (sequences, tokens of each), how many of each are kept, hidden sizes and vocabularies on a CPU.
TOKENS, KEPT = (8, 128), 38
SHAPES = [(512, 32000), (1024, 32000), (2048, 32000), (512, 151936)]
QUICK = [(512, 8000)]
# CUDA, in bfloat16 and all kept: tokens, hidden size, vocabulary.
GPU_SHAPES = [(8192, 4096, 151936), (8192, 2048, 32000)]
GPU_QUICK = [(1024, 1024, 32000)]

OVER_GEMMS = 1 / 1.1  # in at most 1.1 times the three bare products of the kept rows
OVER_EAGER = 3.0
GEMMS = {"cpu": "three bare sgemms", "cuda": "three bare GEMMs"}
EAGER = "TRL's eager path"
LOW, HIGH = 0.2, 0.28


class Job(NamedTuple):
    """Hidden states [B, T, H], weight [V, H], and what a loss knows of each token [B, T]."""

    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    advantages: Tensor  # [B]
    mask: Tensor
    old_log_probs: Tensor

    @property
    def rows(self) -> Tensor:
        """The flat rows of the kept tokens."""
        return self.mask.flatten().nonzero().squeeze(-1)


def make_job(
    device: str, tokens: tuple[int, int], kept: int, hidden: int, classes: int, dtype: torch.dtype
) -> Job:
    """Logits of variance 1, ratios of about 0.5 to 2, and as many kept tokens in each sequence."""
    states = torch.randn(*tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(classes, hidden, device=device, dtype=dtype) / hidden**0.5
    targets = torch.randint(0, classes, tokens, device=device)
    order = torch.rand(tokens, device=device).argsort(-1)
    job = Job(states, weight, targets, torch.randn(tokens[0], device=device), order < kept, order)
    log_probs = torch.zeros(tokens, device=device)
    with torch.no_grad():
        log_probs[job.mask] = _log_probs(states[job.mask], weight, targets[job.mask]).float()
    return job._replace(old_log_probs=log_probs + 0.3 * torch.randn(tokens, device=device))


def _log_probs(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return -F.cross_entropy(wide, tokens, reduction="none")


def torch_loss(log_probs: Tensor, job: Job) -> Tensor:
    """The mean over kept tokens of the clipped objective, from log-probs [B, T]."""
    ratio = torch.exp(log_probs - job.old_log_probs.to(log_probs))
    advantages = job.advantages[:, None].to(log_probs)
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
    return -(objective * job.mask).sum() / job.mask.sum()


def ours(job: Job) -> Tensor:
    """A formula over our log-probs."""
    from fusedrl import linear_policy_loss  # pyright: ignore[reportAttributeAccessIssue]

    return linear_policy_loss(*job[:5], old_log_probs=job.old_log_probs, loss="dapo").loss


def eager(job: Job) -> Tensor:
    """Logits of every token, then log-probs as TRL takes them from logits."""
    from trl.trainer.utils import selective_log_softmax  # pyright: ignore[reportMissingImports]

    return torch_loss(selective_log_softmax(F.linear(job.hidden, job.weight), job.tokens), job)


def on_kept_rows(job: Job) -> Tensor:
    """Plain torch, on the logits of the kept rows alone."""
    rows = job.rows
    kept = _log_probs(job.hidden.flatten(0, 1)[rows], job.weight, job.tokens.flatten()[rows])
    log_probs = job.old_log_probs.to(kept).flatten().index_copy(0, rows, kept)
    return torch_loss(log_probs.view(job.tokens.shape), job)


def liger(job: Job) -> Tensor:
    """Liger's fused loss on the kept rows, a sequence at a time."""
    from liger_kernel.chunked_loss import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearGRPOLoss,
    )

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0, epsilon_low=LOW, epsilon_high=HIGH, loss_type="dapo", compiled=False,
        use_ref_model=False,
    )  # fmt: skip
    count = len(job.tokens)
    hidden = job.hidden[job.mask].view(count, -1, job.hidden.shape[-1])
    tokens, old = (x[job.mask].view(count, -1) for x in (job.tokens, job.old_log_probs))
    mask = torch.ones_like(tokens)
    return loss(hidden, job.weight, tokens, mask, job.advantages, old_per_token_logps=old)[0]


def gradients(path: Callable[[Job], Tensor], job: Job) -> tuple[Tensor, Tensor]:
    """Of the loss, with respect to the hidden states and the weight."""
    hidden, weight = (x.detach().requires_grad_() for x in job[:2])
    path(job._replace(hidden=hidden, weight=weight)).backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad


def truth(job: Job) -> Tensor:
    """Some of the gradients in float64."""
    doubles = job._replace(hidden=job.hidden.double(), weight=job.weight.double())
    return sample_of(gradients(on_kept_rows, doubles))


def bare_products(job: Job) -> Callable[[Job], None]:
    """The three products of the kept rows, into memory that is there already."""
    dtype = torch.float32 if job.weight.device.type == "cpu" else job.weight.dtype
    states, weight = job.hidden[job.mask].to(dtype), job.weight.to(dtype)
    logits = states.new_empty(len(states), len(weight))
    grad_states, grad_weight = torch.empty_like(states), torch.empty_like(weight)

    def products(_: Job) -> None:
        torch.mm(states, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_states)
        torch.mm(logits.T, states, out=grad_weight)

    return products


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Forward and backward on every shape."""
    for tokens, kept, hidden, classes, dtype in settings(device, quick):
        job = make_job(device, tokens, kept, hidden, classes, dtype)
        yield make_case(job, usable)
        del job  # before the next one is made


def settings(device: str, quick: bool) -> Iterator[tuple]:
    """Arguments of :func:`make_job`."""
    if device == "cuda":
        for tokens, hidden, classes in GPU_QUICK if quick else GPU_SHAPES:
            yield (8, tokens // 8), tokens // 8, hidden, classes, torch.bfloat16
        return
    for hidden, classes in QUICK if quick else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            yield TOKENS, KEPT, hidden, classes, dtype


def make_case(job: Job, usable: set[str]) -> Case:
    """Gradients of a step; the work is three products of the kept rows."""
    gemms = GEMMS[job.weight.device.type]
    paths = {"torch, kept rows": on_kept_rows}
    if peers.is_installed(peers.LIGER):
        paths["Liger, kept rows"] = liger
    if peers.TRL in usable:
        paths[EAGER] = eager
    paths["fusedrl"] = ours
    classes, hidden = job.weight.shape
    dtype = str(job.weight.dtype).removeprefix("torch.")
    return Case(
        op="linear_policy_loss, forward + backward",
        setting=f"{job.tokens.numel()} x {hidden} x {classes} {dtype}, {len(job.rows)} kept",
        make_input=lambda: job,
        contenders={
            name: lambda job, path=path: gradients(path, job) for name, path in paths.items()
        },
        timed_only={gemms: bare_products(job)},
        truth=truth,
        answer=sample_of,
        goals={gemms: OVER_GEMMS, EAGER: OVER_EAGER},
        work=6.0 * len(job.rows) * job.weight.numel(),
        ceiling=gemms,
    )
