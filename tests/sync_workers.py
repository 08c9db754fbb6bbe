"""What the workers of the weight-sync tests import: a policy that tells torn weights by itself."""

from __future__ import annotations

import time

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Unbounded
from torchrl.envs import Transform, TransformedEnv
from weights_workers import Ones


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


class Scored(Transform):
    """Adds the least and greatest weight of a model of its own to what the environment returns."""

    def __init__(self, version: float = 1.0) -> None:
        super().__init__(in_keys=[], out_keys=[])
        self.model = Canary(version, pause=0.0)

    def _reset(self, tensordict, tensordict_reset):
        return self._step(None, tensordict_reset)

    def _step(self, tensordict, next_tensordict):
        with torch.no_grad():
            _, low, high = self.model(torch.ones(1))
        return next_tensordict.set("model_low", low).set("model_high", high)

    def transform_observation_spec(self, spec):
        for name in ("model_low", "model_high"):
            spec[name] = Unbounded((1,))
        return spec


def scored() -> TransformedEnv:
    return TransformedEnv(Ones(), Scored())


class Callable:
    """A policy that is no module, and has one."""

    def __init__(self) -> None:
        self.module = canary_policy(0.0)

    def __call__(self, tensordict):
        return self.module(tensordict)
