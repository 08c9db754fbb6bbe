"""Weights whose memory was freed or exchanged since they were published or loaded last."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusedrl.channel import WeightChannel

FREED = "expected a dense tensor, got a tensor whose memory is freed"


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def free(module: nn.Module) -> None:
    module[0].weight.untyped_storage().resize_(0)


def free_view(module: nn.Module) -> None:
    """A view in the middle has an address even where its memory has none."""
    memory = torch.zeros(40)
    module[0].weight.data = memory[20:36].view(4, 4)
    memory.untyped_storage().resize_(0)


def free_buffer(module: nn.Module) -> None:
    module[1].running_mean.untyped_storage().resize_(0)


FREEING = (free, free_view, free_buffer)


@pytest.mark.parametrize("freeing", FREEING)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("given", [False, True])
def test_freed_weights_are_not_published(freeing, dtype, given):
    trained = model()
    name = r"1\.running_mean" if freeing is free_buffer else r"0\.weight"
    with WeightChannel.create(trained, dtype=dtype) as channel, channel.handle.open() as reader:
        for _ in range(2):
            channel.publish()
        with reader.lease() as lease:
            before = lease.weights.clone()
        freeing(trained)
        for _ in range(2):
            with pytest.raises(TypeError, match=f"weights: {name}: {FREED}; gather or load"):
                channel.publish(trained if given else None)
        with reader.lease() as lease:
            assert lease.version == 2
            assert (lease.weights == before).all()
        # Loaded again, as by what offloads them.
        trained[0].weight.data = torch.full((4, 4), 3.0)
        trained[1].running_mean = torch.full((4,), 3.0)
        assert channel.publish() == 3
        with reader.lease() as lease:
            assert float(lease.weights["0", "weight"].mean()) == 3


@pytest.mark.parametrize("freeing", FREEING)
@pytest.mark.parametrize("load", ["copy", "alias"])
def test_nothing_is_loaded_into_memory_that_was_freed(freeing, load):
    with WeightChannel.create(model().requires_grad_(False)) as channel:
        channel.publish()
        with channel.handle.open() as reader:
            policy = model().requires_grad_(False)
            reader.load_into(policy, load)
            if load == "alias" and freeing is not free_buffer:
                # The parameter only loses what it does not need.
                free_view(policy)
                channel.publish()
                reader.load_into(policy, load)
                assert torch.isfinite(policy[0].weight).all()
                return
            freeing(policy)
            channel.publish()
            with pytest.raises(TypeError, match=f"module: .*: {FREED}"):
                reader.load_into(policy, load)
