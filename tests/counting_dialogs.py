"""An environment whose dialogs end after so many turns, and a policy that says what it saw."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase


class Counting(EnvBase):
    """Row ``i`` has dialogs of ``turns + i`` turns; an observation is dialog * 100 + turn."""

    def __init__(self, rows: int | None = 2, turns: int = 3, lazy: bool = False) -> None:
        super().__init__(batch_size=() if rows is None else (rows,))
        shape = self.batch_size
        flag = {"shape": (*shape, 1), "dtype": torch.bool}
        self.observation_spec = Composite(
            seen=Unbounded((*shape, 1), dtype=torch.int64),
            text=NonTensor(shape, example_data="a"),
            shape=shape,
        )
        self.action_spec = Unbounded((*shape, 1), dtype=torch.int64)
        self.reward_spec = Unbounded((*shape, 1))
        self.full_done_spec = Composite(
            done=Binary(1, **flag), terminated=Binary(1, **flag), shape=shape
        )
        self.lazy = lazy
        self.resets = self.steps = 0
        self.dialog = torch.zeros(*shape, 1, dtype=torch.int64)
        self.turn = torch.zeros_like(self.dialog)
        self.length = turns + torch.arange(self.turn.numel()).view_as(self.turn)

    def _state(self, **more: Any) -> TensorDictBase:
        seen = self.dialog * 100 + self.turn
        words = [f"turn {n}" for n in seen.flatten().tolist()]
        text = NonTensorStack(*words) if self.batch_size else words[0]
        over = self.turn >= self.length
        state = TensorDict(
            {"seen": seen, "text": text, "done": over, "terminated": over.clone(), **more},
            self.batch_size,
        )
        return state.to_lazystack(0) if self.lazy else state

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.resets += 1
        anew = torch.ones_like(self.turn, dtype=torch.bool)
        if tensordict is not None and "_reset" in tensordict:
            anew = tensordict["_reset"].view_as(self.turn)
        self.dialog = torch.where(anew, self.dialog + 1, self.dialog)
        self.turn = torch.where(anew, 0, self.turn)
        return self._state()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        self.turn = self.turn + 1
        return self._state(reward=self.turn.float())

    def _set_seed(self, seed: int | None) -> None:
        pass


class Numbers(Counting):
    """The same without text, which a pool of processes can exchange through shared memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.observation_spec.pop("text")

    def _state(self, **more: Any) -> TensorDictBase:
        return super()._state(**more).exclude("text")


def policy(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", 10 * tensordict["seen"])


def seen(batch: TensorDictBase) -> Any:
    return batch["seen"].squeeze(-1).tolist()


class Rounded(torch.nn.Module):
    """A model whose actions are whole numbers."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.linear(seen.float()).long()
