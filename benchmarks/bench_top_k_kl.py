"""top_k_kl: the divergence from a teacher known by its k likeliest classes, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bench_exact_kl import DTYPES, ROWS
from .harness import Case

SHAPES = [(256, 151936), (512, 32000)]  # rows, classes
GPU_SHAPES = [(4096, 151936)]  # in bfloat16
KNOWN = 64  # classes of a row
LEAST_REST = 1e-6  # of the teacher's probability, as the op takes it
PLAIN = "log_softmax, gather"


class Job(NamedTuple):
    """Logits, and what is known of the teacher of each row."""

    logits: Tensor
    ids: Tensor
    teacher: Tensor


def reverse_kl(job: Job) -> Tensor:
    """Reverse KL over the known classes and the rest, in the dtype of the logits."""
    student = torch.log_softmax(job.logits, -1).gather(-1, job.ids)
    known = job.teacher.to(student)
    # The student's rest is 1 less the others too: it has no digits where that is small.
    rests = [
        (1 - x.exp().sum(-1, keepdim=True)).clamp(min=LEAST_REST).log() for x in (student, known)
    ]
    student, known = (torch.cat(pair, -1) for pair in zip((student, known), rests, strict=True))
    return (student.exp() * (student - known)).sum(-1)


def plain_torch(job: Job) -> Tensor:
    """In float32, as users write it."""
    return reverse_kl(job._replace(logits=job.logits.float()))


def truth(job: Job) -> Tensor:
    """The same in float64, some rows at a time."""
    blocks = zip(*(x.split(ROWS) for x in job), strict=True)
    return torch.cat([reverse_kl(Job(x.double(), ids, y.double())) for x, ids, y in blocks])


def gradient(path: Callable[[Job], Tensor], job: Job) -> Tensor:
    """Of the sum over rows, as far as a comparison of its first rows needs it."""
    leaf = job.logits.detach().requires_grad_()
    (grad,) = torch.autograd.grad(path(job._replace(logits=leaf)).sum(), leaf)
    return grad[:8].double()


def exact_gradient(job: Job) -> Tensor:
    """The same in float64."""
    first = Job(*(x[:8] for x in job))
    return gradient(reverse_kl, first._replace(logits=first.logits.double()))


def make_job(device: str, shape: tuple[int, int], dtype: torch.dtype) -> Job:
    """A student of normal logits, and a teacher near it."""
    logits = 3 * torch.randn(shape, device=device)
    teacher, ids = (logits + 0.5 * torch.randn_like(logits)).log_softmax(-1).topk(KNOWN)
    return Job(logits.to(dtype), ids, teacher)


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Every shape and dtype, forward and with the gradient."""
    if device == "cuda" and not quick:
        settings = [(shape, torch.bfloat16) for shape in GPU_SHAPES]
    else:
        settings = [(s, dtype) for s in (SHAPES[1:] if quick else SHAPES) for dtype in DTYPES]
    for shape, dtype in settings:
        job = make_job(device, shape, dtype)
        yield from both_ways(job)


def both_ways(job: Job) -> Iterator[Case]:
    """The work is to read the logits once, and with the gradient again, and to write that."""
    from fusedrl import top_k_kl  # pyright: ignore[reportAttributeAccessIssue]

    dtype = str(job.logits.dtype).removeprefix("torch.")
    setting = f"[{len(job.logits)}, {job.logits.shape[1]}] {dtype}, {KNOWN} classes known"
    size = job.logits.numel() * job.logits.element_size()
    yield Case(
        op="top_k_kl",
        setting=setting,
        make_input=lambda: job,
        contenders={PLAIN: plain_torch, "fusedrl": lambda job: top_k_kl(*job)},
        truth=truth,
        work=size,
    )
    yield Case(
        op="top_k_kl",
        setting=f"{setting}, gradient",
        make_input=lambda: job,
        contenders={
            PLAIN: lambda job: gradient(plain_torch, job),
            "fusedrl": lambda job: gradient(lambda job: top_k_kl(*job), job),
        },
        truth=exact_gradient,
        work=3 * size,
    )
