"""Frames of a collector whose weights are updated meanwhile: which are whole, and how soon."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

from .channel_workers import Weights

FRAMES_PER_BATCH = 20
NBYTES = 26_000_000


class Endless(EnvBase):
    """An environment in which nothing happens, so that the policy is what takes the time."""

    def __init__(self) -> None:
        super().__init__(batch_size=[])
        self.observation_spec = Composite(observation=Unbounded((1,)))
        self.action_spec = Unbounded((2,))
        self.reward_spec = Unbounded((1,))

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDict:
        return TensorDict(observation=torch.zeros(1))

    def _step(self, tensordict: Any) -> TensorDict:
        done = torch.zeros(1, dtype=torch.bool)
        return TensorDict(observation=torch.zeros(1), reward=torch.zeros(1), done=done)

    def _set_seed(self, seed: int | None) -> None:
        pass


class Canary(Weights):
    """The action is the least and the most that a call read of weights that are all one number."""

    def forward(self, observation: Tensor) -> Tensor:
        """[2]; two numbers where it computed with parts of two versions."""
        return torch.tensor(super().forward())


def canary(nbytes: int) -> TensorDictModule:
    """A policy for ``Endless``."""
    return TensorDictModule(Canary(nbytes), in_keys=["observation"], out_keys=["action"])


class Frames:
    """A collector in another process under continuous updates; call it to count in its frames.

    Args:
        collect: makes the collector of an environment, a policy and options.
        frames: to look at in each call.
    """

    def __init__(self, collect: Callable[..., Any], frames: int):
        policy = canary(NBYTES)
        self.frames = frames
        self.version = 0
        self.weights = TensorDict.from_module(policy).data.clone()
        options = {"frames_per_batch": FRAMES_PER_BATCH, "track_policy_version": True}
        self.collector = collect(Endless, policy, **options)
        self.batches = iter(self.collector)
        self.first = float(next(self.batches)["policy_version"].flatten()[0])  # of weights of 0

    def __call__(self, _: Any = None) -> Tensor:
        """[2]: how many frames had torn weights, and how many had not those that their tag says."""
        stop = threading.Event()
        trainer = threading.Thread(target=self._update, args=(stop,))
        trainer.start()
        counts, seen = torch.zeros(2, dtype=torch.float64), 0
        try:
            while seen < self.frames:
                batch = next(self.batches).reshape(-1)
                low, high = batch["action"].unbind(-1)
                tag = batch["policy_version"].flatten() - self.first
                counts += torch.stack([(low != high).sum(), ((low != tag) | (high != tag)).sum()])
                seen += batch.numel()
        finally:
            stop.set()
            trainer.join()
        return counts

    def _update(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.version += 1
            for weight in self.weights.values(True, True):
                weight.fill_(self.version)
            self.collector.update_policy_weights_(self.weights)

    def close(self) -> None:
        """End the worker."""
        self.collector.shutdown()


class Follower:
    """A collector in another process; each call updates it and waits until a frame shows that.

    Args:
        collect: as of :class:`Frames`.
        weights: what an update sends, all of them the number of their version.
        nbytes: of the weights.
    """

    frames_per_batch = 1

    def __init__(self, collect: Callable[..., Any], weights: Any, nbytes: int):
        self.weights = weights
        options = {"frames_per_batch": self.frames_per_batch}
        self.collector = collect(Endless, canary(nbytes), **options)
        self.batches = iter(self.collector)

    def __call__(self, version: int) -> Tensor:
        """[frames, 2]: the first batch with a call that computed with all of the weights."""
        self.collector.update_policy_weights_(self.weights)
        return self.follow(version)

    def follow(self, version: int) -> Tensor:
        """The same, once the weights are sent."""
        while True:
            actions = next(self.batches)["action"].reshape(-1, 2)
            if (actions == version).all(-1).any():
                return actions

    def close(self) -> None:
        """End the worker."""
        self.collector.shutdown()


class Updated(Follower):
    """Each call lets the worker begin another batch and updates it meanwhile."""

    frames_per_batch = 100

    def __call__(self, version: int) -> None:
        """Nothing."""
        next(self.batches)
        self.collector.update_policy_weights_(self.weights)
