"""What each rank of a sharded vocabulary runs, where a spawned process can import it."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from fusedrl import linear_policy_loss, linear_token_log_probs
from fusedrl.ops import RECIPES

CLASSES, WIDTH = 2300, 12


def problem(dtype=torch.float32):
    torch.manual_seed(0)
    head = torch.randn(2, 5, WIDTH), torch.randn(CLASSES, WIDTH), torch.randn(CLASSES)
    mask = torch.arange(10).view(2, 5) % 4 != 2
    tokens = torch.tensor([0, 1099, 1100, 1106, 1107, 2299, 5, 1103, 2000, 1500]).view(2, 5)
    return (*(x.to(dtype) for x in head), tokens, mask)


def run(hidden, weight, bias, upstream, tokens, mask, **options):
    """Log-probs, entropy and the gradients of the head, and the hidden states' of a frozen head."""
    leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
    out = linear_token_log_probs(
        *(*leaves[:2], tokens, mask), bias=leaves[2], entropy=True, temperature=0.8, **options
    )
    ups = [up.to(x) for up, x in zip(upstream, out, strict=True)]
    grads = torch.autograd.grad(tuple(out), leaves, ups)
    frozen = linear_token_log_probs(
        *(leaves[0], weight, tokens, mask), bias=bias, temperature=0.8, **options
    ).log_probs
    return [x.detach() for x in out], (*grads, *torch.autograd.grad(frozen, leaves[0], ups[0]))


def run_loss(hidden, weight, bias, upstream, tokens, mask, **options):
    """A loss whose ratio is that of each token, one of whole sequences, and their gradients."""
    advantages, old_log_probs = upstream
    found = []
    for loss in ("dapo", "gspo"):
        leaves = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias)]
        value = linear_policy_loss(
            *(*leaves[:2], tokens, None, mask), bias=leaves[2], token_advantages=advantages,
            loss=RECIPES[loss]._replace(low=0.9, high=0.9), entropy_coeff=0.1,
            old_log_probs=old_log_probs - 8, **options,
        ).loss  # fmt: skip
        found += [value.detach(), *torch.autograd.grad(value, leaves)]
    return found


def on_a_rank(rank: int, bounds: list[int], dtype: torch.dtype, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(bounds) - 1,
        timeout=timedelta(seconds=60),
    )
    hidden, weight, bias, tokens, mask = problem(dtype)
    upstream = torch.randn(2, *tokens.shape)  # the seed is that of `problem`: alike on all ranks
    mine = slice(bounds[rank], bounds[rank + 1])
    shard = {"vocab_offset": mine.start, "vocab_group": dist.group.WORLD}
    found = [
        run(hidden, weight[mine], bias[mine], upstream, tokens, mask, shift=shift, **shard)
        for shift in (False, True)
    ]
    part = hidden, weight[mine], bias[mine], upstream, tokens, mask
    losses = run_loss(*part, **shard)
    torch.save((found, losses), f"{folder}/{rank}")
    dist.destroy_process_group()
