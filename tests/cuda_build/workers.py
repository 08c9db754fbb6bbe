"""What the other process does in the tests of channels. Copies are what computes something here."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn


def weights_of(version):
    """On the CPU, from where a publish copies them to the GPU."""
    return {name: torch.full((1 << 18,), float(version)) for name in "ab"}


def values_of(weights):
    """All numbers that the weights are."""
    return sorted({x for weight in weights.values() for x in weight.cpu().unique().tolist()})


def lease_each(pipe, handle):
    """Lease once for each message: the version, the device and the numbers."""
    with handle.open() as reader:
        while pipe.recv():
            with reader.lease() as lease:
                weights = lease.weights
                pipe.send((lease.version, str(weights["a"].device), values_of(weights)))


class Says(nn.Module):
    """The action is its one weight, which lies on the GPU."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1, device="cuda"))

    def forward(self, seen):
        assert self.value.is_cuda
        return self.value.cpu().long().expand(seen.shape)


def policy():
    return TensorDictModule(Says(), in_keys=["seen"], out_keys=["action"])
