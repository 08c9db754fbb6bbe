"""What worker processes import: an environment, and a policy that answers its weight."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import EnvBase


class Ones(EnvBase):
    """Observes ones and never ends; takes one number as its action."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,))
        self.done_spec = Binary(1, dtype=torch.bool, shape=(1,))

    def _reset(self, tensordict, **kwargs):
        return TensorDict({"observation": torch.ones(1)})

    def _step(self, tensordict):
        return TensorDict(
            {
                "observation": torch.ones(1),
                "reward": torch.zeros(1),
                "done": torch.zeros(1, dtype=torch.bool),
            }
        )

    def _set_seed(self, seed):
        return seed


class Uneven(Ones):
    """Its trajectories have two frames, four, two, ..."""

    length = left = 4

    def _reset(self, tensordict, **kwargs):
        self.length = self.left = 6 - self.length
        return super()._reset(tensordict, **kwargs)

    def _step(self, tensordict):
        self.left -= 1
        return super()._step(tensordict).set("done", torch.tensor([self.left == 0]))


def make_policy(weight: float = 0.0) -> TensorDictModule:
    """Its actions in :class:`Ones` are its only weight."""
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, weight)
    return TensorDictModule(linear, in_keys=["observation"], out_keys=["action"])
