"""The environment of ``examples/grpo.py``: the bundled questions, with a reward for digits."""

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
    """The fraction of digits in each answer, 0 for an empty one."""
    texts = map(_text, answers)
    return torch.tensor([sum(map(str.isdigit, text)) / max(len(text), 1) for text in texts])


def write_answers(file: Path, batches: Iterable[dict[str, Any]]) -> None:
    """Write questions and answers in a format of ``fusedrl score``.

    Args:
        file: JSON lines file to write.
        batches: result of ``train()`` of ``examples/grpo.py``.
    """
    with file.open("w", encoding="utf-8") as lines:
        for batch in batches:
            for prompt, answer in zip(batch["prompts"], batch["completions"], strict=True):
                json.dump({"prompt": prompt, "completion": _text(answer)}, lines)
                lines.write("\n")


def _text(answer: str) -> str:
    return answer.removesuffix("<|im_end|>")


class Reward(Transform):
    """Writes the reward of each answer, with the shape of torchrl's scorers.

    Args:
        rewards: function from the answers of a group to one reward each.
    """

    def __init__(self, rewards: Rewards) -> None:
        super().__init__()
        self.rewards = rewards

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        rewards = self.rewards(list(tensordict["text"].response))
        return next_tensordict.set("reward", rewards.view(-1, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """The shape that ``_step`` writes."""
        reward_spec["reward"] = Unbounded(shape=torch.Size((*reward_spec.shape, 1, 1)))
        return reward_spec


def make_env(tokenizer: Any, group: int, rewards: Rewards) -> TransformedEnv:
    """An environment that asks each bundled question in ``group`` dialogs of one turn.

    Args:
        tokenizer: the tokenizer of the policy.
        group: number of parallel dialogs.
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
    # ChatEnv never ends a dialog, and MCAdvantage needs finished trajectories: end after one turn.
    return env.append_transform(StepCounter(max_steps=1))
