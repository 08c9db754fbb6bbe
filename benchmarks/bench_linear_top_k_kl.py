"""linear_top_k_kl: from hidden states and a head, beside making the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import bench_top_k_kl
from .bench_exact_kl import DTYPES
from .bench_top_k_kl import KNOWN
from .harness import Case

SHAPES = [(512, 512, 32000), (256, 1024, 151936)]  # rows, hidden size, classes
QUICK = [(256, 256, 8000)]
GPU_SHAPES = [(4096, 2048, 151936), (4096, 4096, 32000)]  # in bfloat16
GEMM = "bare GEMM"
GEMMS = "three bare GEMMs"
PLAIN = "logits, log_softmax, gather"


class Job(NamedTuple):
    """Hidden states, a head, and what is known of the teacher of each row."""

    hidden: Tensor
    weight: Tensor
    ids: Tensor
    teacher: Tensor

    def of_logits(self) -> bench_top_k_kl.Job:
        """The same with the logits made."""
        return bench_top_k_kl.Job(F.linear(self.hidden, self.weight), self.ids, self.teacher)


def plain_torch(job: Job) -> Tensor:
    """The logits, and a log_softmax of them in float32."""
    return bench_top_k_kl.plain_torch(job.of_logits())


def double(job: Job) -> Job:
    """The same job in float64."""
    return job._replace(hidden=job.hidden.double(), weight=job.weight.double())


def truth(job: Job) -> Tensor:
    """The same in float64."""
    return bench_top_k_kl.truth(double(job).of_logits())


def gradients(path: Callable[[Job], Tensor], job: Job) -> Tensor:
    """Of the hidden states; that of the weight is computed too."""
    leaves = [x.detach().requires_grad_() for x in (job.hidden, job.weight)]
    out = path(job._replace(hidden=leaves[0], weight=leaves[1]))
    return torch.autograd.grad(out.sum(), leaves)[0].double()


def exact_gradients(job: Job) -> Tensor:
    """The same in float64."""
    return gradients(lambda job: bench_top_k_kl.reverse_kl(job.of_logits()), double(job))


def make_job(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Job:
    """Logits of standard deviation 3, and a teacher near them."""
    rows, width, classes = shape
    hidden = torch.randn(rows, width, device=device, dtype=dtype)
    weight = 3 * torch.randn(classes, width, device=device, dtype=dtype) / width**0.5
    logits = F.linear(hidden, weight).float()
    teacher, ids = (logits + 0.5 * torch.randn_like(logits)).log_softmax(-1).topk(KNOWN)
    return Job(hidden, weight, ids, teacher)


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Every shape and dtype, forward and with the gradients."""
    if device == "cuda":
        settings = [(shape, torch.bfloat16) for shape in (QUICK if quick else GPU_SHAPES)]
    else:
        settings = [(shape, dtype) for shape in (QUICK if quick else SHAPES) for dtype in DTYPES]
    for shape, dtype in settings:
        yield from both_ways(make_job(device, shape, dtype))


def both_ways(job: Job) -> Iterator[Case]:
    """The work is one product, and with the gradients three."""
    from fusedrl import linear_top_k_kl  # pyright: ignore[reportAttributeAccessIssue]

    on_cpu = job.weight.device.type == "cpu"
    # As in bench_linear_token_log_probs: on a CPU the products alone are those of float32.
    hidden, weight = (x.float() if on_cpu else x for x in (job.hidden, job.weight))
    logits = hidden.new_empty(len(hidden), len(weight))
    grads = torch.empty_like(hidden), torch.empty_like(weight)

    def one_product(_: Job) -> None:
        torch.mm(hidden, weight.T, out=logits)

    def three_products(job: Job) -> None:
        one_product(job)
        torch.mm(logits, weight, out=grads[0])
        torch.mm(logits.T, hidden, out=grads[1])

    dtype = str(job.weight.dtype).removeprefix("torch.")
    setting = f"{len(hidden)} x {hidden.shape[1]} x {len(weight)} {dtype}, {KNOWN} classes known"
    product = 2.0 * len(hidden) * hidden.shape[1] * len(weight)
    yield Case(
        op="linear_top_k_kl",
        setting=setting,
        make_input=lambda: job,
        contenders={PLAIN: plain_torch, "fusedrl": lambda job: linear_top_k_kl(*job)},
        timed_only={GEMM: one_product},
        truth=truth,
        work=product,
        ceiling=GEMM,
    )
    yield Case(
        op="linear_top_k_kl",
        setting=f"{setting}, gradients",
        make_input=lambda: job,
        contenders={
            PLAIN: lambda job: gradients(plain_torch, job),
            "fusedrl": lambda job: gradients(lambda job: linear_top_k_kl(*job), job),
        },
        timed_only={GEMMS: three_products},
        truth=exact_gradients,
        work=3 * product,
        ceiling=GEMMS,
    )
