"""TRL's functions over logits, its fused LM head and a loss over it, beside ours in their place."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedrl.integrations import trl as ours

from . import bench_linear_policy_loss as policy
from . import peers
from .bench_linear_token_log_probs import Job, exact_gradients, gradients, make_job, sample_of
from .harness import Case

NEEDS = {peers.TRL}

SHAPE = (4, 256, 32000)  # what a step of GRPO scores, in logits
HIDDEN = 512
QUICK_CLASSES = 8000
SMALL_CLASSES = 1500  # a vocabulary where there is little to win, and where ours must cost nothing
SMALL_ROWS = ((2, 64), SHAPE[:2])
SMALL_WIDTHS = (64, HIDDEN)
CANDIDATES = 4  # classes a row, where several are asked for
DTYPES = (torch.float32, torch.bfloat16)
HEAD_OUTPUTS = {"GRPO": ("log_probs", "entropy"), "SFT": ("log_probs", "entropy", "is_top1")}
LOSS_TOKENS, LOSS_KEPT = (8, 128), 77  # prompt tokens too, as TRL's head gets them on a CPU
TRL_CHUNK = 32768  # classes at a time, as TRL's trainers pass them


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Log-probs and entropy from logits, forward and with gradients; a training head; a loss."""
    classes = QUICK_CLASSES if quick else SHAPE[-1]
    for dtype in DTYPES:
        yield from logits_cases(device, (*SHAPE[:2], classes), dtype)
    for dtype in DTYPES:
        job = make_job(device, SHAPE[:2], HIDDEN, classes, dtype, 1.0)
        for trainer in HEAD_OUTPUTS:
            yield head_case(job, trainer)
    for dtype in DTYPES:
        for kept in (LOSS_KEPT, LOSS_TOKENS[1]):
            yield loss_case(policy.make_job(device, LOSS_TOKENS, kept, HIDDEN, classes, dtype))
    for dtype in DTYPES:
        for rows in SMALL_ROWS:
            yield from logits_cases(device, (*rows, SMALL_CLASSES), dtype)
            for width in SMALL_WIDTHS:
                job = make_job(device, rows, width, SMALL_CLASSES, dtype, 1.0)
                yield from (head_case(job, trainer) for trainer in HEAD_OUTPUTS)


def logits_cases(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Case]:
    """``selective_log_softmax``, its gradient, several classes a row, and with the entropy."""
    from trl.trainer import utils as theirs  # pyright: ignore[reportMissingImports]

    logits = torch.randn(shape, device=device, dtype=dtype)
    index = torch.randint(0, shape[-1], shape[:-1], device=device)
    read = logits.nbytes

    def gradient(module: Any, logits: Tensor) -> Tensor:
        leaf = logits.detach().requires_grad_()
        module.selective_log_softmax(leaf, index).mean().backward()
        assert leaf.grad is not None
        return leaf.grad

    several = torch.randint(0, shape[-1], (*shape[:-1], CANDIDATES), device=device)

    def exact(logits: Tensor) -> Tensor:
        return exact_several(logits, index[..., None]).squeeze(-1)

    def exact_several(logits: Tensor, classes: Tensor = several) -> Tensor:
        return torch.log_softmax(logits.double(), -1).gather(-1, classes)

    def exact_gradient(logits: Tensor) -> Tensor:
        p = torch.softmax(logits.double(), -1)
        hit = torch.full_like(index[..., None], 1, dtype=p.dtype)
        return torch.scatter_add(-p, -1, index[..., None], hit) / index.numel()

    jobs = {
        "selective_log_softmax": (lambda m, x: m.selective_log_softmax(x, index), exact, read),
        "selective_log_softmax, forward + backward": (gradient, exact_gradient, 3 * read),
        f"selective_log_softmax, {CANDIDATES} classes a row": (
            lambda m, x: m.selective_log_softmax(x, several),
            exact_several,
            read,
        ),
        "selective_log_softmax_and_entropy": (
            lambda m, x: m.selective_log_softmax_and_entropy(x, index)[0],
            exact,
            read,
        ),
    }
    for op, (run, truth, work) in jobs.items():
        yield Case(
            op=f"trl: {op}",
            setting=f"{list(shape)} {_name(dtype)}",
            make_input=lambda: logits,
            contenders={
                "TRL": lambda x, run=run: run(theirs, x),
                "fusedrl": lambda x, run=run: run(ours, x),
            },
            truth=truth,
            work=work,
        )


def head_case(job: Job, trainer: str) -> Case:
    """Forward and backward from hidden states, with what the trainer asks of the head."""
    from trl.kernels.chunked_logprob import (  # pyright: ignore[reportMissingImports]
        ChunkedLogProbFunction as Theirs,
    )

    from fusedrl.integrations.trl_head import ChunkedLogProbFunction as Ours

    def path(function: Any, job: Job) -> Tensor:
        arguments = job.states(), job.weight, None, job.targets(), 1.0, TRL_CHUNK
        return function.apply(*arguments, None, 1.0, HEAD_OUTPUTS[trainer])[0]

    hidden, weight = job.hidden, job.weight
    return Case(
        op="trl: fused LM head, forward + backward",
        setting=f"{trainer}, {hidden.shape[:2].numel()} tokens, hidden {hidden.shape[-1]}, "
        f"V {len(weight)} {_name(hidden.dtype)}",
        make_input=lambda: job,
        contenders={
            "TRL": lambda job: gradients(lambda j: path(Theirs, j), job),
            "fusedrl": lambda job: gradients(lambda j: path(Ours, j), job),
        },
        truth=exact_gradients,
        answer=sample_of,
    )


def loss_case(job: policy.Job) -> Case:
    """A DAPO loss from hidden states and its gradients, through the head of TRL's trainers."""
    from trl.kernels.chunked_logprob import (  # pyright: ignore[reportMissingImports]
        ChunkedLogProbFunction as Theirs,
    )

    from fusedrl.integrations.trl_head import ChunkedLogProbFunction as Ours
    from fusedrl.integrations.trl_loss import expecting

    def path(function: Any, job: policy.Job) -> Tensor:
        arguments = job.hidden.flatten(0, 1), job.weight, None, job.tokens.flatten()
        outputs = HEAD_OUTPUTS["GRPO"]
        log_probs = function.apply(*arguments, 1.0, TRL_CHUNK, None, 1.0, outputs)[0]
        return policy.torch_loss(log_probs.view(job.tokens.shape), job)

    def planned(job: policy.Job) -> Tensor:
        with expecting(plan_of(job)):
            return path(Ours, job)

    hidden, weight = job.hidden, job.weight
    return Case(
        op="trl: loss over the fused LM head, forward + backward",
        setting=f"DAPO, {int(job.mask.sum())} of {job.mask.numel()} tokens, "
        f"hidden {hidden.shape[-1]}, V {len(weight)} {_name(hidden.dtype)}",
        make_input=lambda: job,
        contenders={
            "TRL": lambda job: policy.gradients(lambda j: path(Theirs, j), job),
            "fusedrl, log-probs alone": lambda job: policy.gradients(lambda j: path(Ours, j), job),
            "fusedrl": lambda job: policy.gradients(planned, job),
        },
        truth=policy.truth,
        answer=sample_of,
    )


def plan_of(job: policy.Job) -> Any:
    """What TRL's trainer tells of the loss of these tokens."""
    from fusedrl.integrations.trl_loss import Plan, PlanMisses
    from fusedrl.ops.linear_policy_loss.losses import PolicyBatch, Surrogate, TermWeights

    return Plan(
        tokens=job.tokens,
        scored=job.mask,
        kept=job.mask,
        before=0,
        batch=PolicyBatch(job.advantages[:, None].expand(job.mask.shape), job.old_log_probs, None),
        weights=TermWeights(job.mask / job.mask.sum()),
        surrogate=Surrogate("clip", 1 - policy.LOW, 1 + policy.HIGH, math.inf, "k3"),
        level="token",
        trainer="GRPOTrainer",
        record=PlanMisses(),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
