"""AsyncCollector with torchrl's dialogs and a model that really generates."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from async_chats import chat, dataset
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.modules.llm import TransformersWrapper

from fusedrl import AsyncCollector, LLMCollector

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("prepared")]

OPTIONS: dict[str, Any] = {"dialog_turns_per_batch": 4, "total_dialog_turns": 12}


@pytest.fixture
def greedy(tokenizer, policy_model) -> TransformersWrapper:
    return TransformersWrapper(
        copy.deepcopy(policy_model),
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 5, "do_sample": False},
    )


def texts(batch: TensorDictBase) -> list[str]:
    return [str(h.full.content) for h in batch.reshape(-1)["history"].unbind(0)]


def tokens(batch: TensorDictBase) -> list[list[int]]:
    flat = batch.reshape(-1)
    return [row.tolist() for row in flat.get(("tokens", "full"), as_list=True)]


def test_the_dialogs_of_a_collector_in_this_process(tokenizer, greedy):
    with AsyncCollector(
        partial(chat, tokenizer), greedy, collector_class=LLMCollector, **OPTIONS
    ) as c:
        ours = [(batch.shape, texts(batch), tokens(batch)) for batch in c]
    collector = LLMCollector(chat(tokenizer), policy=greedy, **OPTIONS)
    theirs = [(batch.shape, texts(batch), tokens(batch)) for batch in collector]
    assert ours == theirs and len(ours) == 3


def test_updates_change_answers_and_versions_in_a_replay_buffer(tokenizer, greedy):
    trained = copy.deepcopy(greedy.model)
    buffer = ReplayBuffer(storage=LazyStackStorage(20), batch_size=3)
    with AsyncCollector(
        partial(dataset, tokenizer),
        greedy,
        collector_class=LLMCollector,
        replay_buffer=buffer,
        prefetch=0,
        track_policy_version=True,
        dialog_turns_per_batch=2,
        total_dialog_turns=6,
    ) as collector:
        for _ in collector:
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter.mul_(1.5).add_(0.1 * torch.randn_like(parameter))
                greedy.model.load_state_dict(trained.state_dict())
            collector.update_policy_weights_()
    stored = buffer[:]
    assert stored["policy_version"].flatten().tolist() == [1, 1, 2, 2, 3, 3]
    assert stored["next", "policy_version"].flatten().tolist() == [1, 1, 2, 2, 3, 3]
    assert len(buffer.sample()) == 3
