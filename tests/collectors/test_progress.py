"""The figures of a batch, and what a collector logs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs import StepCounter
from torchrl.modules.llm import TransformersWrapper
from transforms.dialogs import rows

from fusedrl import LLMCollector, turn_metrics


@pytest.fixture
def greedy(tokenizer, policy_model) -> Callable[..., TransformersWrapper]:
    def greedy(pad: bool = False, **options: Any) -> TransformersWrapper:
        return TransformersWrapper(
            policy_model,
            tokenizer=tokenizer,
            pad_output=pad,
            generate_kwargs={"max_new_tokens": 5, "do_sample": False, **options},
        )

    return greedy


@pytest.mark.parametrize("pad", [False, True], ids=["ragged", "padded"])
def test_tokens_are_those_of_the_responses(chat_env, collect, greedy, tokenizer, pad):
    """As a policy writes them; padding is none."""
    whole = collect(chat_env(StepCounter(1)), policy=greedy()).next()
    answers = [row.tolist() for row in rows(whole.reshape(-1), ("tokens", "response"))]
    assert turn_metrics(whole)["turns/tokens"] == sum(map(len, answers)) == 20
    end = answers[0][1]
    lengths = [1 + answer.index(end) if end in answer else 5 for answer in answers]
    assert len(set(lengths)) > 1
    ending = greedy(pad, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    batch = collect(chat_env(StepCounter(1)), policy=ending).next()
    assert turn_metrics(batch)["turns/tokens"] == sum(lengths)


def test_the_figures_of_a_batch_are_one_flat_dictionary(chat_env, collect, greedy):
    batch = collect(chat_env(StepCounter(1)), policy=greedy(), track_policy_version=True).next()
    versions = batch.reshape(-1)["next", "policy_version"]
    assert turn_metrics(batch, int(versions.max()) + 2) == {
        "turns/count": batch.numel(),
        "turns/tokens": sum(map(len, rows(batch.reshape(-1), ("tokens", "response")))),
        "turns/reward": 1,
        "turns/version": versions.min().item(),
        "turns/staleness": versions.max().item() + 2 - versions.min().item(),
    }
    ragged = lazy_stack([TensorDict({"next": {"reward": torch.ones(n)}}) for n in (1, 3)])
    assert turn_metrics(ragged, prefix="") == {"count": 2, "reward": 1}
    with pytest.raises(ValueError, match="track_policy_version"):
        turn_metrics(ragged, 1)
    assert turn_metrics(batch.reshape(-1)[:0], 1) == {"turns/count": 0}


def logged(collector: LLMCollector, caplog: Any) -> list[str]:
    with caplog.at_level("INFO", logger="fusedrl"):
        for _ in collector:
            collector.increment_version()
    return [record.getMessage() for record in caplog.records if record.levelname == "INFO"]


def test_verbose_logs_a_line_for_each_batch(collect, caplog):
    collector = collect(verbose=True, track_policy_version=True)
    answer = collector.policy
    collector.policy = lambda turn: collector.increment_version() or answer(turn)
    assert logged(collector, caplog) == [
        "LLMCollector: turns 4, reward 1.5, version 0, staleness 2",  # the turns have 0 and 1
        "LLMCollector: turns 8, reward 2.75, version 3, staleness 2",
    ]
