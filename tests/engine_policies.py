"""Policies that generate with a vLLM engine, their dialogs, and what these must be."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from async_chats import loader
from tiny_engines import OPTIONS, expected, offline, tiny_model
from torch import nn
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import vLLMWrapper
from transformers import AutoTokenizer
from transforms.conftest import OneReward

CONTEXT: int = OPTIONS["max_model_len"]
RESPONSE, PROMPT, TOKENS = ("tokens", "response"), ("tokens", "prompt"), "token_policy_version"

_OF_THIS_PROCESS = ExitStack()


def versions(folder: Path, count: int) -> list[nn.Module]:
    """Models that differ; the first is saved in a folder, for an engine to start with."""
    models = [tiny_model(folder, initializer_range=0.2)]  # far from uniform predictions
    for _ in range(1, count):
        models.append(copy.deepcopy(models[0]))
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return models


def wrapped(engine: Any, **options: Any) -> vLLMWrapper:
    """A policy; greedy, and of chats, unless told otherwise."""
    greedy = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    given = {"generate_kwargs": greedy | options.pop("generate_kwargs", {})}
    return vLLMWrapper(engine, tokenizer=engine.get_tokenizer(), **(options | given))


def policy_in(folder: Path) -> vLLMWrapper:
    """A policy with an engine of its own, in the process that calls this, until that ends."""
    return wrapped(_OF_THIS_PROCESS.enter_context(offline(folder)))


def stopping(policy: vLLMWrapper) -> vLLMWrapper:
    """One whose answers are of several lengths: many tokens end them."""
    from vllm import SamplingParams

    policy.sampling_params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=24, logprobs=1, stop_token_ids=[*range(2, 100)]
    )
    return policy


def dialogs(folder: Path, rows: int = 2, turns: int = 2) -> EnvBase:
    """Chats of so many turns each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    env = TransformedEnv(ChatEnv(batch_size=(rows,), tokenizer=tokenizer))
    for part in (DataLoadingPrimer(dataloader=loader(rows)), OneReward(), StepCounter(turns)):
        env.append_transform(part)
    return env


def checked(batch: Any, models: list[nn.Module]) -> list[int]:
    """The versions of turns, whose tokens are those that transformers generates with them."""
    found = []
    for turn in batch.reshape(-1).unbind(0):
        version, response = int(turn["next", "policy_version"]), turn[RESPONSE].tolist()
        assert response == expected(models[version], turn[PROMPT].tolist(), len(response))
        assert int(turn["policy_version"]) == version
        for part in (turn, turn["next"]):
            assert part[TOKENS].dtype == torch.int64
            assert part[TOKENS].tolist() == [version] * len(response)
        found.append(version)
    return found
