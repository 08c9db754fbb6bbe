"""GRPO on ranks that share a policy by FSDP2, with other answers on each rank.

``torchrun --nproc-per-node 2 fsdp2_grpo.py`` runs it on two ranks; ``python fsdp2_grpo.py`` too.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch.distributed import run
from torch.distributed.fsdp import fully_shard
from torchrl.modules.llm import TransformersWrapper

from fusedrl import GRPOLoss
from fusedrl.demo.models import make_model, make_tokenizer  # tiny, not trained

STEPS, QUESTION, WANTED = 8, 6, 7


def answers(rank: int, count: int) -> TensorDictBase:
    """So many answers, each of other lengths; one with more of the token ``WANTED`` is better."""
    generator = torch.Generator().manual_seed(rank)
    samples = []
    for _ in range(count):
        length = int(torch.randint(4, 20, (), generator=generator))
        tokens = torch.randint(3, 99, (QUESTION + length,), generator=generator)
        answer = torch.arange(len(tokens)) >= QUESTION
        good = torch.rand(len(tokens), generator=generator) < torch.rand((), generator=generator)
        tokens = torch.where(answer & good, WANTED, tokens)
        reward = (tokens[answer] == WANTED).float().mean()
        samples.append(
            TensorDict(
                tokens=TensorDict(full=tokens, prompt=tokens[:QUESTION]),
                masks=TensorDict(all_attention_mask=torch.ones_like(answer)),
                log_probs=TensorDict(full=torch.where(answer, -5.0, torch.nan)),
                advantage=(reward - 0.5).view(1, 1),
            )
        )
    return lazy_stack(samples)


def train() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    tokenizer = make_tokenizer(["2 + 2? It is 4."])
    torch.manual_seed(0)  # ranks begin with one model
    model = make_model(len(tokenizer)).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    actor = TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
    )
    loss = GRPOLoss(actor, entropy_bonus=False)
    loss.average_tokens_across_devices = True  # the ranks have other numbers of tokens
    data = answers(rank, count=2 + 2 * rank).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        value = loss(data).loss_objective
        value.backward()  # FSDP averages the gradients
        optimizer.step()
        optimizer.zero_grad()
        total = value.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step}: loss of all ranks {float(total) / dist.get_world_size():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        run.main(["--standalone", "--nproc-per-node", "2", sys.argv[0]])
