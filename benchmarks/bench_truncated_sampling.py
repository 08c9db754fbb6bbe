"""Truncated sampling: log-probs over the classes that a sampler left, beside those over all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fusedrl import linear_token_log_probs, token_log_probs

from .harness import Case

TOKENS, LEFT = 512, 64  # tokens, and classes that are left of each
HIDDEN, CLASSES = 896, 151936  # of Qwen2.5-0.5B
QUICK_HIDDEN, QUICK_CLASSES = 64, 8000
LOGITS_TOKENS = 256
OVER_FULL_HEAD = 10.0
ALL_CLASSES = "all classes"
# Of the gradient of the weight every so many rows are compared.
STRIDE = 97


class Job(NamedTuple):
    """Hidden states [N, H], weight [V, H], tokens [N], and their support."""

    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    support: tuple[Tensor, Tensor]

    def logits_left(self, weight_rows: Tensor) -> Tensor:
        """The logits [N, S / N] of the classes that are left, from their rows of the head."""
        rows = weight_rows.view(len(self.tokens), -1, self.hidden.shape[1])
        return torch.einsum("nh,nkh->nk", self.hidden, rows)

    def log_probs(self, weight_rows: Tensor) -> Tensor:
        """Those of the tokens, from the rows of the head."""
        ids = self.support[0].view(len(self.tokens), -1)
        own = (ids == self.tokens[:, None]).to(torch.int64).argmax(1, keepdim=True)
        return self.logits_left(weight_rows).log_softmax(-1).gather(1, own).squeeze(1)


def make_job(device: str, tokens: int, hidden: int, classes: int) -> Job:
    """Logits of variance 1; each token is among its own classes, which are random."""
    states = torch.randn(tokens, hidden, device=device)
    weight = torch.randn(classes, hidden, device=device) / hidden**0.5
    rows = [torch.randperm(classes)[:LEFT].sort().values for _ in range(tokens)]
    ids = torch.stack(rows).to(device)
    own = torch.randint(0, LEFT, (tokens, 1), device=device)
    offsets = torch.arange(tokens + 1, device=device) * LEFT
    return Job(states, weight, ids.gather(1, own).squeeze(1), (ids.flatten(), offsets))


def fused(job: Job) -> Tensor:
    """Ours."""
    return linear_token_log_probs(job.hidden, job.weight, job.tokens, support=job.support)


def all_classes(job: Job) -> Tensor:
    """Ours without the support: the log-probs of another policy."""
    return linear_token_log_probs(job.hidden, job.weight, job.tokens)


def full_head(job: Job) -> Tensor:
    """Logits of all classes, those that were left out at -inf, as a trainer would do it."""
    return masked(job.hidden @ job.weight.T, job)


def masked(logits: Tensor, job: Job) -> Tensor:
    """Log-probs from the logits of all classes."""
    left = torch.zeros_like(logits, dtype=torch.bool)
    left.scatter_(1, job.support[0].view(len(job.tokens), -1), True)
    log_probs = logits.float().masked_fill(~left, -torch.inf).log_softmax(-1)
    return log_probs.gather(1, job.tokens[:, None]).squeeze(1)


def truth(job: Job) -> Tensor:
    """Log-probs in float64."""
    exact = job._replace(hidden=job.hidden.double())
    return exact.log_probs(job.weight[job.support[0]].double())


def gradients(path: Callable[[Job], Tensor], job: Job) -> Tensor:
    """Of the sum, with respect to the hidden states and to some rows of the weight."""
    hidden, weight = (x.detach().requires_grad_() for x in job[:2])
    path(job._replace(hidden=hidden, weight=weight)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return torch.cat([hidden.grad.flatten(), weight.grad[::STRIDE].flatten()])


def exact_gradients(job: Job) -> Tensor:
    """The same in float64, from the rows of the head that count."""
    ids = job.support[0]
    hidden = job.hidden.double().requires_grad_()
    rows = job.weight[ids].double().requires_grad_()
    job._replace(hidden=hidden).log_probs(rows).sum().backward()
    assert hidden.grad is not None and rows.grad is not None
    sampled = ids % STRIDE == 0
    grad = torch.zeros_like(job.weight[::STRIDE], dtype=torch.float64)
    grad.index_add_(0, ids[sampled] // STRIDE, rows.grad[sampled])
    return torch.cat([hidden.grad.flatten(), grad.flatten()])


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """From hidden states, forward and then with the backward pass; then from logits."""
    hidden, classes = (QUICK_HIDDEN, QUICK_CLASSES) if quick else (HIDDEN, CLASSES)
    job = make_job(device, TOKENS, hidden, classes)
    setting = f"{TOKENS} x {hidden} x {classes} float32, {LEFT} classes left"
    yield Case(
        op="linear_token_log_probs, truncated sampling",
        setting=setting,
        make_input=lambda: job,
        contenders={"full head, masked": full_head, "fusedrl": fused},
        timed_only={ALL_CLASSES: all_classes},
        truth=truth,
        goals={ALL_CLASSES: OVER_FULL_HEAD},
    )
    yield Case(
        op="linear_token_log_probs, truncated sampling, forward + backward",
        setting=setting,
        make_input=lambda: job,
        contenders={"fusedrl": lambda job: gradients(fused, job)},
        timed_only={ALL_CLASSES: lambda job: gradients(all_classes, job)},
        truth=exact_gradients,
        goals={ALL_CLASSES: OVER_FULL_HEAD},
    )
    yield of_logits(make_job(device, LOGITS_TOKENS, 8, classes))


def of_logits(job: Job) -> Case:
    """From logits, which are there already."""
    logits = job.hidden @ job.weight.T
    return Case(
        op="token_log_probs, truncated sampling",
        setting=f"[{len(job.tokens)}, {len(job.weight)}] float32, {LEFT} classes left",
        make_input=lambda: job,
        contenders={
            "masked log_softmax": lambda job: masked(logits, job),
            "fusedrl": lambda job: token_log_probs(logits, job.tokens, support=job.support),
        },
        timed_only={ALL_CLASSES: lambda job: token_log_probs(logits, job.tokens)},
        truth=truth,
    )
