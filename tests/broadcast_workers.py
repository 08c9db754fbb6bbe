"""The ranks of a process group, a process each, that do what a pipe tells them."""

from __future__ import annotations

from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor

from fusedrl.channel import WeightChannel
from fusedrl.channel.broadcast import broadcast


def weights_of(number: float, size: int = 1000) -> dict[str, Tensor]:
    number = float(number)
    return {"a": torch.full((size,), number), "b.c": torch.full((2, 3), number).bfloat16()}


class Rank:
    """What a rank can be told; every answer goes through its pipe."""

    def __init__(self) -> None:
        self.channel = WeightChannel.create(weights_of(0), timeout=20, rank_timeout=10)
        self.other = WeightChannel.create(weights_of(0, size=10 + dist.get_rank()))

    def handle(self):
        return self.channel.handle

    def publish(self, number: float, version: int) -> int | None:
        return self.channel.publish(weights_of(number), version)

    def broadcast(self, number: float | None = None, size: int = 1000, **options) -> int:
        weights = None if number is None else weights_of(number, size)
        return broadcast(self.channel, weights, **options)

    def broadcast_between_layouts(self) -> int:
        return broadcast(self.other)


def run(rank: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{store}", timedelta(seconds=30), world_size=2, rank=rank
    )
    worker = Rank()
    while message := pipe.recv():
        name, args, options = message
        try:
            pipe.send(getattr(worker, name)(*args, **options))
        except Exception as error:
            pipe.send(error)
    dist.destroy_process_group()
