"""Two ranks that share a policy by DDP or FSDP2, beside one process with the same conversations.

Times are CPU time, of all threads and both ranks: what the wrapper and the ranks' talk cost. What
it costs without us is in the rows of the bare model: forward passes of one padded batch, with the
head for its last token, and for a step a backward pass and the optimizer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import bench_retrieve_kl as chats
from . import peers
from .channel_workers import Worker
from .harness import Case, Measured, Run, peak_extra_mib

NEEDS = {peers.TORCHRL, peers.TRANSFORMERS}
DEVICES = {"cpu"}

OP = "Ranks"
RANKS = 2
HIDDEN, VOCAB, LAYERS = 256, 32000, 4
TOKENS, QUICK_TOKENS = [300] * 16, [60] * 4
JOBS = ("log-probs", "KL", "GRPO step")
OVERHEAD, GOAL = 1.15, 2.0  # over one process, and times torchrl's speed
ALONE = "fusedrl, one process"
BARE = "the bare model"


def cases(device: str, quick: bool, usable: set[str]) -> Iterator[Case]:
    """Each job under each wrapper."""
    lengths = QUICK_TOKENS if quick else TOKENS
    with Ranks(1, "none", lengths) as alone:
        for wrapping in ("DDP", "FSDP2"):
            with Ranks(RANKS, wrapping, lengths) as ranks:
                for job in JOBS:
                    yield Case(
                        op=OP,
                        setting=f"{job}, {wrapping}: {RANKS} ranks, {len(lengths)} x ~{lengths[0]} "
                        f"tokens, hidden {HIDDEN}, V {VOCAB}",
                        make_input=lambda: None,
                        contenders={
                            "torchrl": ranks.run(job, "torchrl"),
                            "fusedrl": ranks.run(job, "fusedrl"),
                            ALONE: alone.run(job, "fusedrl"),
                        },
                        timed_only={
                            f"{BARE}, {wrapping}": ranks.run(job, BARE),
                            f"{BARE}, one process": alone.run(job, BARE),
                        },
                        goals={"torchrl": GOAL, ALONE: 1 / OVERHEAD},
                        host_bound=True,
                    )


class Ranks:
    """Processes that do the same jobs, each with its share of the conversations."""

    def __init__(self, size: int, wrapping: str, lengths: list[int]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name, "store"))
        self._workers = [Worker(serve, i, size, store, wrapping, lengths) for i in range(size)]

    def run(self, job: str, whose: str) -> Run:
        """A run of a job with one library's classes."""

        def run(_: Any) -> Measured:
            for worker in self._workers:
                worker.pipe.send((job, whose))
            answers = [worker.answer() for worker in self._workers]
            for error in answers:
                if isinstance(error, Exception):
                    raise error
            seconds, peaks = zip(*answers, strict=True)
            return Measured(sum(seconds), max(peaks))

        return run

    def __enter__(self) -> Ranks:
        """The ranks."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for worker in self._workers:
            worker.close()
        self._folder.cleanup()


def serve(rank: int, size: int, store: str, wrapping: str, lengths: list[int], pipe: Any) -> None:
    """Do jobs until told to end; the CPU time and the memory of each, or its error."""
    torch.set_num_threads(1)
    if size > 1:
        patience = timedelta(minutes=5)
        dist.init_process_group("gloo", f"file://{store}", patience, rank=rank, world_size=size)
    share = chats.conversations(lengths)[rank::size]
    jobs: dict[Any, Callable[[Any], Any]] = {}
    while asked := pipe.recv():
        try:
            if asked not in jobs:
                job, whose = asked
                jobs[asked] = made(job, whose, wrapping, lengths[0])
                jobs[asked](share)  # wrappers allocate and rebuild buckets in a first pass
            if size > 1:
                dist.barrier()
            began = time.process_time()
            peak = peak_extra_mib(jobs[asked], share, "cpu")
            pipe.send((time.process_time() - began, peak))
        except Exception as error:
            pipe.send(error)


def made(job: str, whose: str, wrapping: str, tokens: int) -> Callable[[Any], Any]:
    """A job as a function of conversations of about so many tokens."""
    if whose == BARE:
        return bare(job, wrapping, tokens)
    if whose == "torchrl":
        from torchrl.envs.llm.transforms import RetrieveKL, RetrieveLogProb
        from torchrl.objectives.llm import GRPOLoss
    else:
        from fusedrl import GRPOLoss, RetrieveKL, RetrieveLogProb
    network, reference = wrapped(0, wrapping), wrapped(1, wrapping)
    actor = chats.wrapper(network)
    if job == "log-probs":
        score: Any = RetrieveLogProb(actor)
        return torch.no_grad()(lambda share: score(chats.data(share)))
    if job == "KL":
        kl: Any = RetrieveKL(actor, chats.wrapper(reference, "ref_log_probs"), coeff=0.1)
        return torch.no_grad()(lambda share: kl(chats.data(share, reward_on="cpu")))
    loss_of: Any = GRPOLoss(actor, masking_strategy="rlhf", entropy_bonus=False)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)

    written: list[Any] = []

    def step(share: Any) -> None:
        if not written:  # what a collector writes, before the clock starts
            batch = torch.no_grad()(actor)(chats.data(share))
            batch["advantage"] = torch.linspace(-1, 1, len(share)).view(-1, 1, 1)
            written.append(batch)
        loss_of(written[0].copy()).loss_objective.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(job: str, wrapping: str, tokens: int) -> Callable[[Any], Any]:
    """The forward and backward passes of a job without log-probs."""
    networks = [wrapped(seed, wrapping) for seed in range(2 if job == "KL" else 1)]
    optimizer = torch.optim.SGD(networks[0].parameters(), lr=1e-6)

    def forward(share: Any) -> list[torch.Tensor]:
        ids = torch.ones(len(share), tokens, dtype=torch.int64)
        return [network(input_ids=ids, logits_to_keep=1).logits.sum() for network in networks]

    def step(share: Any) -> None:
        forward(share)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    return step if job == "GRPO step" else torch.no_grad()(forward)


@cache
def wrapped(seed: int, wrapping: str) -> Any:
    """A random Qwen2 that ranks share."""
    model = chats.model(HIDDEN, seed, "cpu", VOCAB, LAYERS)
    if wrapping == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrapping == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (RANKS,))
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    return model
