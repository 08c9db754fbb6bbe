"""AsyncCollector with torchrl's dialogs and a model that really generates."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
from async_chats import chat
from tensordict import TensorDictBase
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
