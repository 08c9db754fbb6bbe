"""A policy's loss where two ranks hold a part of each sequence, as context parallelism has it."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fusedrl import linear_policy_loss

RANKS, VOCABULARY, WIDTH = 2, 1000, 32
# Two packed sequences; the second goes on over both ranks.
OFFSETS = torch.tensor([0, 5, 12])


def batch() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, WIDTH), torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5
    tokens, old_log_probs = torch.randint(VOCABULARY, (12,)), torch.full((12,), -7.0)
    return hidden, weight, tokens, old_log_probs


def loss_of(
    part: slice, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss that these tokens' rows make, and its gradient by the head."""
    hidden, weight, tokens, old_log_probs = batch()
    weight.requires_grad_()
    loss = linear_policy_loss(
        hidden[part],
        weight,
        tokens[part],
        # The advantages and the offsets are of both sequences, on every rank.
        torch.tensor([1.0, -1.0]),
        old_log_probs=old_log_probs[part],
        offsets=OFFSETS,
        shift=True,
        sequence_group=group,
    ).loss
    (gradient,) = torch.autograd.grad(loss, weight)
    return loss.detach(), gradient


def on_a_rank(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    part = slice(6 * rank, 6 * (rank + 1))
    loss, gradient = loss_of(part, dist.group.WORLD)
    for total in (loss, gradient):
        dist.all_reduce(total)
    if rank == 0:
        whole, gradient_of_whole = loss_of(slice(None))
        print(f"sum over the ranks {float(loss):.6f}, one rank alone {float(whole):.6f}")
        print("gradients agree:", torch.allclose(gradient, gradient_of_whole, atol=1e-6))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        args = (f"{folder}/store",)
        mp.start_processes(on_a_rank, args=args, nprocs=RANKS, start_method="fork")
