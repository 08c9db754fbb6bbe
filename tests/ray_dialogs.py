"""What the actors of ``RayLLMCollector`` import: environments, policies, buffers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray_models
import torch
from channel_collector import Says, policy_of
from counting_dialogs import Counting
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.envs import TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

QUESTIONS = ["How are you?", "What is the capital of France?"]


def says() -> Any:
    return policy_of(Says())


def where(tensordict: TensorDictBase) -> TensorDictBase:
    """The action is the process that has the policy."""
    return tensordict.set("action", torch.full_like(tensordict["seen"], os.getpid()))


class Slow(torch.nn.Module):
    """As ``Says``, but waits in the middle of a call until a file is there."""

    def __init__(self, begun: str, go_on: str) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros(1))
        self.other = torch.nn.Parameter(torch.zeros(1))
        self.begun, self.go_on = Path(begun), Path(go_on)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        before = self.value.long() * 1000
        self.begun.touch()
        while not self.go_on.exists():
            time.sleep(0.01)
        return (before + self.other.long()).expand(seen.shape)


def loader() -> Any:
    return torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * 4],
        batch_size=2,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )


def chat_env() -> TransformedEnv:
    env = TransformedEnv(ChatEnv(batch_size=(2,), tokenizer=ray_models.tokenizer()))
    return env.append_transform(DataLoadingPrimer(dataloader=loader()))


def generating() -> TransformersWrapper:
    return TransformersWrapper(
        ray_models.policy_model(),
        tokenizer=ray_models.tokenizer(),
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": True},
    )
