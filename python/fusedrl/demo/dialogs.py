"""The environment of ``examples/grpo.py``: the bundled questions, and a reward for digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.envs import StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer

from fusedrl.demo.models import bundled_chats

Rewards = Callable[[list[str]], torch.Tensor]


def digits(answers: list[str]) -> torch.Tensor:
    """The share of digits in each answer, 0 for an empty one."""
    said = map(_text, answers)
    return torch.tensor([sum(map(str.isdigit, text)) / max(len(text), 1) for text in said])


def write_answers(file: Path, batches: Iterable[dict[str, Any]]) -> None:
    """Write questions and answers as ``fusedrl score`` reads them.

    Args:
        file: JSON lines, replaced if there.
        batches: what ``train()`` of ``examples/grpo.py`` returned.
    """
    with file.open("w", encoding="utf-8") as lines:
        for batch in batches:
            for prompt, said in zip(batch["prompts"], batch["completions"], strict=True):
                json.dump({"prompt": prompt, "completion": _text(said)}, lines)
                lines.write("\n")


def _text(answer: str) -> str:
    return answer.removesuffix("<|im_end|>")


class Reward(Transform):
    """Writes the reward of each answer as torchrl's scorers shape it.

    Args:
        rewards: a function that maps the answers of a group to a float for each.
    """

    def __init__(self, rewards: Rewards) -> None:
        super().__init__()
        self.rewards = rewards

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        rewards = self.rewards(list(tensordict["text"].response))
        return next_tensordict.set("reward", rewards.view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """As ``_step`` makes it."""
        reward_spec["reward"] = Unbounded(shape=torch.Size((*reward_spec.shape, 1, 1)))
        return reward_spec


def make_env(tokenizer: Any, group: int, rewards: Rewards) -> TransformedEnv:
    """Each bundled question goes to ``group`` dialogs, which end after one answer.

    Args:
        tokenizer: that of the policy.
        group: number of dialogs that run side by side.
        rewards: see :class:`Reward`.
    """
    questions = [
        next(message["content"] for message in chat.messages if message["role"] == "user")
        for chat in bundled_chats()
    ]
    queries: Any = [question for question in questions for _ in range(group)]
    loader = torch.utils.data.DataLoader(
        queries,
        batch_size=group,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*batch),  # pyright: ignore[reportAbstractUsage]
            batch_size=(len(batch),),
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(group,), tokenizer=tokenizer))
    env.append_transform(DataLoadingPrimer(dataloader=loader))
    env.append_transform(Reward(rewards))
    # A chat has no end of its own, and MCAdvantage takes trajectories that are done: of one turn.
    return env.append_transform(StepCounter(max_steps=1))
