"""Environments and policies that worker processes of collectors import."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, TensorDictBase
from torchrl.collectors.llm import LLMCollector
from torchrl.data import Binary, Composite, NonTensor, Unbounded
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper

from fusedrl.demo.models import make_model, make_tokenizer

from .bench_collectors import LENGTH, observation

QUESTIONS = ["Why?", "What is it?", "Where does the long way to the sea begin?", "Who was there?"]


class Scripted(EnvBase):
    """Hands out so many turns, made beforehand, over and over.

    Args:
        rows: how many dialogs run at a time.
        lazy: whether a turn is a stack of one tensordict a row.
        text: whether it has texts.
        turns: how many there are.
    """

    def __init__(self, rows: int, lazy: bool, text: bool, turns: int) -> None:
        super().__init__(batch_size=(rows,))
        flag = {"shape": (rows, 1), "dtype": torch.bool}
        seen = Composite(seen=Unbounded((rows, 1), dtype=torch.int64), shape=(rows,))
        if text:
            seen["text"] = NonTensor((rows,), example_data="a")
        self.observation_spec = seen
        self.action_spec = Unbounded((rows, 1), dtype=torch.int64)
        self.reward_spec = Unbounded((rows, 1))
        self.full_done_spec = Composite(
            done=Binary(1, **flag), terminated=Binary(1, **flag), shape=(rows,)
        )
        self.kind = rows, lazy, text
        self.script = itertools.cycle(
            [self._turn(turn, (turn + 1) % turns) for turn in range(turns)]
        )

    def _turn(self, turn: int, following: int) -> tuple[TensorDictBase, TensorDictBase]:
        """A turn with its ``"next"``, and what its dialog, or the one after it, goes on with."""
        over = turn % LENGTH == LENGTH - 1
        state = self._seen(turn, False)
        state.set("action", state.get("seen"))
        after = self._seen(turn + 1, over).set("reward", torch.ones(self.kind[0], 1))
        return state.set("next", after), self._seen(following, False)

    def _seen(self, turn: int, over: bool) -> TensorDictBase:
        rows, lazy, text = self.kind
        state = observation(rows, turn, over, lazy)
        return state if text else state.exclude("text")

    def step_and_maybe_reset(self, tensordict: Any) -> Any:
        """The next turn of the script, whatever the action is."""
        return next(self.script)

    def _reset(self, tensordict: Any = None, **_: Any) -> TensorDictBase:
        return self._seen(0, False)

    def _step(self, tensordict: Any) -> Any:
        raise NotImplementedError

    def _set_seed(self, seed: int | None) -> None:
        pass


def nothing(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy for ``Scripted``, whose turns have their actions."""
    return tensordict


def repeat(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy for ``Scripted`` that acts; torchrl's ``Collector`` wants one that does."""
    return tensordict.set("action", tensordict.get("seen"))


def dialogs_inside(env: Any, *, policy_factory: Any, frames_per_batch: int, **given: Any) -> Any:
    """torchrl's ``LLMCollector`` as torchrl's workers make a collector; they refuse the class."""
    return LLMCollector(
        env,
        policy_factory=policy_factory,
        dialog_turns_per_batch=frames_per_batch,
        track_policy_version=given["track_policy_version"],
    )


class OneReward(Transform):
    """A reward of 1 for every answer, shaped as torchrl's scorers shape it."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("reward", torch.ones(*next_tensordict.batch_size, 1, 1))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """As ``_step`` makes it."""
        reward_spec["reward"] = Unbounded(shape=(*reward_spec.shape, 1, 1))
        return reward_spec


def tokenizer() -> Any:
    """A byte-level BPE that knows the questions; the same in each process."""
    return make_tokenizer(QUESTIONS, size=400)


def chats(rows: int) -> TransformedEnv:
    """Dialogs of two turns; each begins with one of the questions."""
    loader = torch.utils.data.DataLoader(
        [{"query": question} for question in QUESTIONS * rows],  # a whole number of batches
        batch_size=rows,
        collate_fn=lambda batch: TensorDict(
            query=NonTensorStack(*(x["query"] for x in batch)), batch_size=(len(batch),)
        ),
    )
    env = TransformedEnv(ChatEnv(batch_size=(rows,), tokenizer=tokenizer()))
    for transform in (DataLoadingPrimer(dataloader=loader), OneReward(), StepCounter(2)):
        env.append_transform(transform)
    return env


def generating(tokens: int) -> TransformersWrapper:
    """A small Qwen2 that answers with so many sampled tokens."""
    words = tokenizer()
    torch.manual_seed(0)
    return TransformersWrapper(
        make_model(len(words)).eval(),
        tokenizer=words,
        input_mode="history",
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": True},
    )
