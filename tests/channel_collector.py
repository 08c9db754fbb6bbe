"""What a process that collects with a channel's weights imports."""

from __future__ import annotations

from typing import Any

import torch
from counting_dialogs import Counting
from tensordict.nn import TensorDictModule

from fusedrl import LLMCollector, PolicyVersion


class Says(torch.nn.Module):
    """The action is its one weight."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.full((1,), float(value)))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return self.value.long().expand(seen.shape)


def policy_of(module: torch.nn.Module) -> TensorDictModule:
    return TensorDictModule(module, in_keys=["seen"], out_keys=["action"])


def of(batch: Any) -> list[int]:
    """The version of a batch, which its actions are."""
    versions = batch["next", "policy_version"].flatten().tolist()
    assert (
        batch["action"].flatten().tolist() == batch["policy_version"].flatten().tolist() == versions
    )
    return versions


def collect_until_two(handle: Any, answers: Any) -> None:
    collector = LLMCollector(
        Counting(),
        policy=policy_of(Says()),
        dialog_turns_per_batch=2,
        channel=handle,
        track_policy_version=PolicyVersion(),
    )
    while (batch := collector.next()) is not None:
        answers.put(of(batch)[0])
        if of(batch)[0] == 2:
            break
