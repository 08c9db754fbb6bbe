"""Workers that agree, each in a process of its own, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from fusedrl.vllm.worker import FailedElsewhere, Workers


def agree(pipe: Any, store: Path, rank: int, size: int, failing: list[int]) -> None:
    """Do something together, and send the outcome and who goes on."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    ranks = Workers(size, rank, dist.group.WORLD)

    def attempt() -> str:
        if rank in failing:
            raise ValueError(f"no {rank}")
        return f"value {rank}"

    try:
        outcome: Any = ranks.all_or_none(attempt)
    except FailedElsewhere:
        outcome = None
    except RuntimeError as error:
        outcome = error
    # Whoever failed, they go on together.
    outcome = str(outcome), ranks.gathered(rank)
    dist.destroy_process_group()
    pipe.send(outcome)
