"""What the workers of the weight-sync tests import: a policy that tells torn weights by itself."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn


class Canary(nn.Module):
    """Weights that are all their version; answers the least and the greatest that a call saw."""

    def __init__(self, version: float = 1.0, pause: float = 0.001) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((2048,), version))
        self.second = nn.ParameterList([torch.full((64,), version) for _ in range(4)])
        self.register_buffer("saved", torch.full((8,), version))
        self.register_buffer("unsaved", torch.full((1,), 7.0), persistent=False)
        self.pause = pause

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.unsaved.item() == 7.0
        low, high = self.first.min(), self.first.max()
        for weight in (*self.second, self.saved):
            time.sleep(self.pause / 5)  # an update may come in the middle of a call
            low, high = torch.minimum(low, weight.min()), torch.maximum(high, weight.max())
        low, high = torch.minimum(low, self.first.min()), torch.maximum(high, self.first.max())
        return observation * 0, low.expand(1).clone(), high.expand(1).clone()


def canary_policy(version: float = 1.0, pause: float = 0.001) -> TensorDictModule:
    return TensorDictModule(
        Canary(version, pause), in_keys=["observation"], out_keys=["action", "low", "high"]
    )


def weights_of(version: float) -> TensorDict:
    """What ``canary_policy(version)`` has."""
    return TensorDict.from_module(canary_policy(version)).data
