"""GRPO with a policy sharded by FSDP2, while a worker of the first rank generates rollouts.

``torchrun --nproc-per-node 2 fsdp2_grpo.py`` runs it on two ranks; ``python fsdp2_grpo.py`` too.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDictBase, lazy_stack
from torch.distributed import run
from torch.distributed.fsdp import fully_shard
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.modules.llm import TransformersWrapper
from torchrl.objectives.llm import MCAdvantage

from fusedrl import AsyncCollector, GRPOLoss, LLMCollector, RetrieveLogProb, WeightChannel
from fusedrl.demo import dialogs
from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained

# GROUP: answers to a question, distributed over the ranks.
GROUP, BATCHES = 8, 4


def batches_of(channel: WeightChannel, tokenizer: Any) -> Generator[TensorDictBase, None, None]:
    """Answers with advantages, generated with the newest weights of the channel."""

    def make_policy() -> Any:
        """Called in the worker, where the model is not sharded."""
        sampling = {"max_new_tokens": 16, "do_sample": True}
        model = make_model(len(tokenizer))
        return TransformersWrapper(model, tokenizer=tokenizer, generate_kwargs=sampling)

    buffer = ReplayBuffer(
        storage=LazyStackStorage(GROUP),
        sampler=SamplerWithoutReplacement(),
        transform=MCAdvantage(grpo_size=GROUP),
        batch_size=GROUP,
    )
    with AsyncCollector(
        lambda: dialogs.make_env(tokenizer, GROUP, dialogs.digits),
        policy_factory=make_policy,
        channel=channel.handle,
        collector_class=LLMCollector,
        dialog_turns_per_batch=GROUP,
        total_dialog_turns=GROUP * BATCHES,
    ) as collector:
        for batch in collector:
            buffer.extend(batch.reshape(-1))
            yield from buffer


def part_of(batch: TensorDictBase | None) -> TensorDictBase:
    """This rank's share of a batch of the first rank."""
    parts: list[Any] = [None] * dist.get_world_size()
    if batch is not None:
        parts = [lazy_stack(batch.unbind(0)[i :: len(parts)]) for i in range(len(parts))]
    received: list[Any] = [None]
    dist.scatter_object_list(received, parts)
    return received[0]


def train() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    tokenizer = make_tokenizer(["2 + 2? It is 4."])
    torch.manual_seed(0)  # equal initial weights on all ranks
    model = make_model(len(tokenizer)).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="history",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )
    loss_of = GRPOLoss(
        actor,
        entropy_bonus=False,
        masking_strategy="rlhf",
        average_tokens_across_devices=True,  # ranks have different numbers of tokens
    )
    # The trainer computes the log-probs of the answers before the update.
    loss_of.set_keys(sample_log_prob=("next", "log_probs", "full"))
    score = RetrieveLogProb(actor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Every rank calls create() and publish(); the memory is in the first rank.
    with WeightChannel.create(model) as channel:
        channel.publish()
        batches = batches_of(channel, tokenizer) if channel.holds else None
        for _ in range(BATCHES):
            turns = part_of(None if batches is None else next(batches)).to(device)
            value = loss_of(score(turns)).loss_objective
            value.backward()  # FSDP averages the gradients
            optimizer.step()
            optimizer.zero_grad()
            version = channel.publish()
            total = value.detach()
            dist.all_reduce(total)
            if rank == 0:
                mean = float(total) / dist.get_world_size()
                print(f"version {version}: loss of all ranks {mean:.4f}", flush=True)
        if batches is not None:
            batches.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    # Warnings of torch and torchrl.
    warnings.filterwarnings("ignore")
    if "RANK" in os.environ:
        train()
    else:
        run.main(["--standalone", "--nproc-per-node", "2", sys.argv[0]])
