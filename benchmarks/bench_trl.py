"""TRL's functions over logits and its fused LM head, beside ours in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fusedrl.integrations import trl as ours

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
TRL_CHUNK = 32768  # classes at a time, as TRL's trainers pass them


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Log-probs and entropy from logits, forward and with gradients; a training head."""
    classes = QUICK_CLASSES if quick else SHAPE[-1]
    for dtype in DTYPES:
        yield from logits_cases(device, (*SHAPE[:2], classes), dtype)
    for dtype in DTYPES:
        job = make_job(device, SHAPE[:2], HIDDEN, classes, dtype, 1.0)
        for trainer in HEAD_OUTPUTS:
            yield head_case(job, trainer)
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
