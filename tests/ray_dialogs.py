"""What the actor of ``RayLLMCollector`` imports: environments, policies, updaters."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from channel_collector import Says, policy_of
from counting_dialogs import Counting
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors.weight_update import WeightUpdaterBase

QUESTIONS = ["How are you?", "What is the capital of France?"]


def says() -> TensorDictModule:
    return policy_of(Says())


class Seeded(torch.nn.Module):
    """The action is a random number, after the factory has set torch's seed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.randint(2**60, seen.shape)


def draws() -> TensorDictModule:
    return policy_of(Seeded())


def no_checkpoint() -> Any:
    raise LookupError("no such checkpoint")


class Failing(Counting):
    """Cannot take its third step."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.steps == 2:
            raise LookupError("no third step")
        return super()._step(tensordict)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)

    class Tenfold(WeightUpdaterBase):
        """One that a user writes for torchrl: it runs where the policy is."""

        def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Any) -> None:
            collector: Any = self.collector
            with torch.no_grad():
                collector.policy.module.value.copy_(10 * server_weights["module", "value"])


def chat_env(tokenizer: Any) -> Any:
    from torchrl.envs.llm import DatasetChatEnv

    questions = torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * 4],  # pyright: ignore[reportArgumentType]
        batch_size=2,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    return DatasetChatEnv.from_dataloader(
        tokenizer=tokenizer, dataloader=questions, batch_size=(2,)
    )
