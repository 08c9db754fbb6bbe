"""The environments of dialogs that the worker of an AsyncCollector makes."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from transforms.conftest import QUESTIONS, OneReward


def loader(size: int) -> Any:
    return torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * 8],
        batch_size=size,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )


def chat(tokenizer: Any) -> EnvBase:
    """Two dialogs at a time, of two turns, with a reward of 1 a turn."""
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=tokenizer))
    for part in (DataLoadingPrimer(dataloader=loader(2)), OneReward(), StepCounter(2)):
        env.append_transform(part)
    return env
