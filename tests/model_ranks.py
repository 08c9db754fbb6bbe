"""What each rank with a model of its own or a part of one runs, for a process to import."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.test_lengths import rope
from models.tiny import model_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from fusedrl import linear_token_log_probs
from fusedrl.models import causal_log_probs

LONG = torch.arange(3, 53), [30, 20]


def longrope() -> Any:
    """A model that computes sequences alone, whose head is asked for its logits."""
    model = model_of("llama", **rope("llama", "longrope"))
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def scores(model: Any, *tokens: Any) -> Any:
    """Log-probs, or the text of the error."""
    try:
        with torch.no_grad():
            return causal_log_probs(model, *tokens).log_probs
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def on_a_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    options: Any = {"init_method": f"file://{folder}/store", "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", rank=rank, world_size=2, **options)
    found = {}
    if rank == 0:
        found["alone"] = scores(longrope(), *LONG)
    # The ranks of a sharded model have one sequence and two, and make as many passes.
    sharded = longrope()
    fully_shard(sharded, mesh=DeviceMesh("cpu", [0, 1]))
    some = LONG if rank == 0 else (LONG[0][:30], [30])
    found["sharded"] = scores(sharded, *some)
    # A head that holds half of the vocabulary, and one that gives its logits as a DTensor.
    half = model_of("llama")
    half.lm_head.weight = torch.nn.Parameter(half.lm_head.weight[50 * rank : 50 * rank + 50])
    found["half"] = scores(half, torch.arange(3, 12), [9])
    mesh = DeviceMesh("cpu", [0, 1])

    def as_dtensor(module: Any, args: Any, out: Any) -> None:
        out.logits = distribute_tensor(out.logits, mesh, [Shard(-1)])

    spread = model_of("llama")
    spread.register_forward_hook(as_dtensor)
    found["dtensor"] = scores(spread, torch.arange(3, 12), [9])
    weight = distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"weight: expected a tensor of this rank, got a DTensor"):
        linear_token_log_probs(torch.randn(2, 4), weight, torch.arange(2))
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()
