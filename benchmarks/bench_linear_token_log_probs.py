"""linear_token_log_probs: log-probs from hidden states, beside the matrix products alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import peers
from .bench_token_log_probs import Batch, reference_path
from .harness import Case, Run

# CPU: (batch, tokens a row), hidden sizes and vocabularies; 30% of the tokens are kept.
TOKENS = (8, 128)
HIDDEN = (512, 1024, 2048)
VOCABULARY = (32000, 151936)
KEPT = 0.3
QUICK = [(512, 8000)]
BACKWARD = [(1024, 32000)]  # torch's bfloat16 takes minutes for larger ones
# CUDA, in bfloat16 and all kept: tokens, hidden size, vocabulary.
GPU_SHAPES = [(8192, 4096, 151936), (8192, 2048, 151936), (8192, 4096, 32000), (1024, 4096, 151936)]
GPU_QUICK = [(1024, 1024, 32000)]

OVER_GEMM = 1 / 1.25  # forward in at most 1.25 times the bare product
OVER_GEMMS = 1 / 1.2  # forward and backward in at most 1.2 times the four bare products
OVER_TORCHRL = 3.0
MEMORY = 1 / 10  # of the logits of all tokens, in the input's dtype

# By device: the contender of the matrix products alone. On a CPU they are those of float32 whatever
# the dtype: where there are no bfloat16 instructions its own products are several times slower.
GEMM = {"cpu": "bare sgemm", "cuda": "bare GEMM"}
GEMMS = {"cpu": "four bare sgemms", "cuda": "four bare GEMMs"}
TORCHRL_PATH = "lm_head + torchrl path"
# Of the gradient of the weight every so many rows are compared.
STRIDE = 97
# Classes at a time, in float64.
CHUNK = 8192


class Job(NamedTuple):
    """Hidden states [B, T, H], weight [V, H], tokens [B, T], and the mask of those to score."""

    hidden: Tensor
    weight: Tensor
    tokens: Tensor
    mask: Tensor | None
    rows: Tensor  # [M] the flat rows of the hidden states that the kept tokens read
    kept: Tensor  # [M] the flat kept tokens

    def states(self) -> Tensor:
        """The hidden states that the kept tokens read, [M, H]."""
        flat = self.hidden.flatten(0, 1)
        return flat if self.mask is None else flat[self.rows]

    def targets(self) -> Tensor:
        """The kept tokens, [M]."""
        return self.tokens.flatten()[self.kept]

    @property
    def flops(self) -> float:
        """Floating-point operations of one product of the kept rows with the weight."""
        return 2.0 * len(self.rows) * self.weight.numel()


def make_job(
    device: str, tokens: tuple[int, int], hidden: int, classes: int, dtype: torch.dtype, keep: float
) -> Job:
    """Logits of variance 1; with ``keep`` below 1 each token is scored from the row before it."""
    states = torch.randn(*tokens, hidden, device=device, dtype=dtype)
    weight = torch.randn(classes, hidden, device=device, dtype=dtype) / hidden**0.5
    targets = torch.randint(0, classes, tokens, device=device)
    mask = None
    if keep < 1:
        mask = torch.rand(tokens, device=device) < keep
        mask[:, 0] = False
    everything = torch.arange(targets.numel(), device=device)
    kept = everything if mask is None else mask.flatten().nonzero().squeeze(-1)
    return Job(states, weight, targets, mask, kept if mask is None else kept - 1, kept)


def torchrl_path(job: Job) -> Tensor:
    """Logits of every token, then what torchrl does with them."""
    assert job.mask is not None
    logits = F.linear(job.hidden, job.weight)
    return reference_path(Batch(logits, job.tokens, job.mask))


def plain_torch(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Logits of the rows [M, H], then cross entropy in float32."""
    logits = F.linear(hidden, weight)
    return -F.cross_entropy(logits.float(), tokens, reduction="none")


def on_kept_rows(path: Callable) -> Callable[[Job], Tensor]:
    """A function of (hidden [M, H], weight, tokens [M]) as a contender."""
    return lambda job: path(job.states(), job.weight, job.targets())


def truth(job: Job) -> Tensor:
    """Log-probs of the kept tokens in float64, some classes at a time."""
    states, targets = job.states().double(), job.targets()
    total = torch.full_like(states[:, 0], -torch.inf)
    for weight in job.weight.split(CHUNK):
        total = torch.logaddexp(total, torch.logsumexp(states @ weight.double().T, -1))
    return (states * job.weight[targets].double()).sum(-1) - total


def exact_gradients(job: Job) -> Tensor:
    """What :func:`sample_of` takes of the gradients of the sum of the log-probs, in float64."""
    states, targets = job.states().double(), job.targets()
    chosen = job.weight[targets].double()
    total = (states * chosen).sum(-1) - truth(job)
    grad_states = chosen
    grad_weight = []
    for start in range(0, len(job.weight), CHUNK):
        weight = job.weight[start : start + CHUNK].double()
        p = torch.exp(states @ weight.T - total[:, None])
        grad_states = grad_states - p @ weight
        first = -start % STRIDE
        classes = torch.arange(start + first, start + len(weight), STRIDE, device=targets.device)
        hits = (targets == classes[:, None]).double()
        grad_weight.append((hits - p[:, first::STRIDE].T) @ states)
    grad_hidden = torch.zeros_like(job.hidden, dtype=torch.float64).flatten(0, 1)
    grad_hidden[job.rows] = grad_states
    return torch.cat([grad_hidden.flatten(), torch.cat(grad_weight).flatten()])


def sample_of(gradients: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of the hidden states and some rows of that of the weight, to compare."""
    grad_hidden, grad_weight = gradients
    return torch.cat([grad_hidden.flatten(), grad_weight[::STRIDE].flatten()])


def gradients(path: Callable[[Job], Tensor], job: Job) -> tuple[Tensor, Tensor]:
    """Of the sum of the log-probs, with respect to the hidden states and the weight."""
    hidden, weight = (x.detach().requires_grad_() for x in job[:2])
    path(job._replace(hidden=hidden, weight=weight)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return hidden.grad, weight.grad


def at_medium_precision(path: Callable[[Job], Tensor]) -> Callable[[Job], Any]:
    """Gradients where float32 products may be rounded to bfloat16."""

    def run(job: Job) -> tuple[Tensor, Tensor]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")
        try:
            return gradients(path, job)
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def bare_products(job: Job) -> tuple[Run, Run]:
    """The forward product, and all four of a training step, into memory that is there already.

    Training computes the logits twice, since they are not kept.
    """
    dtype = torch.float32 if job.weight.device.type == "cpu" else job.weight.dtype
    states, weight = job.states().to(dtype), job.weight.to(dtype)
    logits = states.new_empty(len(states), len(weight))
    grad_states, grad_weight = torch.empty_like(states), torch.empty_like(weight)

    def forward(_: Job) -> None:
        torch.mm(states, weight.T, out=logits)

    def training(_: Job) -> None:
        torch.mm(states, weight.T, out=logits)
        torch.mm(states, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_states)
        torch.mm(logits.T, states, out=grad_weight)

    return forward, training


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Forward on every shape, then forward and backward on every shape."""
    for backward in (False, True):
        for tokens, hidden, classes, dtype, keep in settings(device, quick, backward):
            job = make_job(device, tokens, hidden, classes, dtype, keep)
            make_case = backward_case if backward else forward_case
            yield make_case(job, usable)
            del job  # before the next one is made


def settings(device: str, quick: bool, backward: bool) -> Iterator[tuple]:
    """Arguments of :func:`make_job`."""
    if device == "cuda":
        for tokens, hidden, classes in GPU_QUICK if quick else GPU_SHAPES:
            yield (1, tokens), hidden, classes, torch.bfloat16, 1.0
        return
    every = [(hidden, classes) for hidden in HIDDEN for classes in VOCABULARY]
    shapes = QUICK if quick else BACKWARD if backward else every
    for hidden, classes in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            yield TOKENS, hidden, classes, dtype, KEPT


def our_paths(job: Job) -> dict[str, Callable]:
    """Every implementation of ours that the device has, called as in training."""
    from fusedrl import linear_token_log_probs  # pyright: ignore[reportAttributeAccessIssue]

    def with_impl(impl: str) -> Callable:
        def path(job: Job, **options: Any) -> Any:
            arguments = job.hidden, job.weight, job.tokens, job.mask
            shift = job.mask is not None
            found = linear_token_log_probs(*arguments, shift=shift, impl=impl, **options)
            return found.log_probs

        return path

    if job.weight.device.type == "cpu":
        return {"fusedrl": with_impl("auto")}
    return {"fusedrl cuda": with_impl("cuda"), "fusedrl triton": with_impl("triton")}


def rival_paths(job: Job, usable: set[str], of_peers: dict[str, Callable]) -> dict[str, Callable]:
    """The other ways, those of ``of_peers`` that are usable among them."""
    paths: dict[str, Callable] = {"torch": plain_torch}
    if job.mask is None:
        paths["torch.compile"] = torch.compile(plain_torch, dynamic=False)
    paths |= peers.chosen(of_peers, usable)
    rivals: dict[str, Callable] = {name: on_kept_rows(path) for name, path in paths.items()}
    return rivals if job.mask is None else {TORCHRL_PATH: torchrl_path, **rivals}


def forward_case(job: Job, usable: set[str]) -> Case:
    """Log-probs of the kept tokens; the work is their rows' product with the weight."""
    rivals = rival_paths(job, usable, peers.LINEAR_LOG_PROBS)
    mine = our_paths(job)
    entropies = {
        f"{name} + entropy": lambda job, path=path: path(job, entropy=True)
        for name, path in mine.items()
    }
    bare, _ = bare_products(job)
    gemm = GEMM[job.weight.device.type]
    logits = job.tokens.numel() * len(job.weight) * job.weight.element_size()
    return Case(
        op="linear_token_log_probs",
        setting=_setting(job),
        make_input=lambda: job,
        contenders={**rivals, **mine, **entropies},
        timed_only={gemm: bare},
        truth=truth,
        answer=lambda out: out if out.dim() == 1 else out.flatten()[job.kept],
        goals={gemm: OVER_GEMM, TORCHRL_PATH: OVER_TORCHRL},
        work=job.flops,
        ceiling=gemm,
        most_extra_mib=MEMORY * logits / 2**20,
    )


def backward_case(job: Job, usable: set[str]) -> Case:
    """Gradients; the work is four products, of a path that does not keep the logits."""
    mine = our_paths(job)
    paths = rival_paths(job, usable, peers.LINEAR_LOG_PROB_SUM) | mine
    _, bare = bare_products(job)
    gemms = GEMMS[job.weight.device.type]
    contenders: dict[str, Run] = {
        name: lambda job, path=path: gradients(path, job) for name, path in paths.items()
    }
    if job.weight.device.type == "cpu" and job.weight.dtype == torch.bfloat16:
        contenders |= {f"{name}, medium": at_medium_precision(path) for name, path in mine.items()}
    return Case(
        op="linear_token_log_probs, forward + backward",
        setting=_setting(job),
        make_input=lambda: job,
        contenders=contenders,
        timed_only={gemms: bare},
        truth=exact_gradients,
        answer=sample_of,
        goals={gemms: OVER_GEMMS},
        work=4 * job.flops,
        ceiling=gemms,
    )


def _setting(job: Job) -> str:
    classes, hidden = job.weight.shape
    dtype = str(job.weight.dtype).removeprefix("torch.")
    kept = "all" if job.mask is None else f"{KEPT:.0%}"
    return f"{job.tokens.numel()} x {hidden} x {classes} {dtype}, {kept} kept"
