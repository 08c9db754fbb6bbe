"""Frames that a torchrl collector gathers while its weights are updated: which of them are whole."""

from __future__ import annotations

import threading
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn
from torchrl.collectors import MultiAsyncCollector
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase

FRAMES_PER_BATCH = 20


class Endless(EnvBase):
    """An environment in which nothing happens, so that the policy is what takes the time."""

    def __init__(self):
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


class Canary(nn.Module):
    """Weights that all have the number of their version; the action is the least and the most."""

    def __init__(self, tensors: int, numel: int):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(numel) for _ in range(tensors))

    def forward(self, observation: Tensor) -> Tensor:
        """[2]; two numbers where the policy computed with parts of two versions."""
        ends = torch.stack([end for w in self.weights for end in (w[0], w[-1])]).detach()
        return torch.stack(ends.aminmax())


class Frames:
    """A collector in another process under continuous updates; call it to count in its frames.

    Args:
        scheme: the weight-sync scheme of the policy.
        frames: to look at in each call.
    """

    def __init__(self, scheme: Any, frames: int, tensors: int = 400, numel: int = 16384):
        module = Canary(tensors, numel)
        policy = TensorDictModule(module, in_keys=["observation"], out_keys=["action"])
        self.frames = frames
        self.version = 0
        self.weights = TensorDict.from_module(policy).data.clone()
        self.collector: Any = MultiAsyncCollector(
            [Endless],
            policy,
            frames_per_batch=FRAMES_PER_BATCH,
            total_frames=-1,
            track_policy_version=True,
            weight_sync_schemes={"policy": scheme},
        )
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
