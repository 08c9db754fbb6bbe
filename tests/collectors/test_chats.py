"""LLMCollector with torchrl's own dialogs, a policy that really generates, and our transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.envs import AsyncEnvPool, StepCounter
from torchrl.modules.llm import TransformersWrapper
from transforms.dialogs import assert_rows_equal, rows

from fusedrl import LLMCollector, RetrieveKL

GEN, REF = ("log_probs", "full"), ("ref_log_probs", "full")


@pytest.fixture
def collect(generating_policy) -> Iterator[Callable[..., LLMCollector]]:
    """A collector, two batches of four turns; shut down after the test."""
    made = []

    def collect(env: Any, cls: type = LLMCollector, **options: Any) -> Any:
        given = {"policy": generating_policy, "dialog_turns_per_batch": 4, "total_dialog_turns": 8}
        made.append(cls(env, **(given | options)))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown()


def check(batch: TensorDictBase, turns: int) -> None:
    """So many turns, each with the KL of two models that differ, and a reward less by it."""
    data = batch.reshape(-1)["next"]
    assert data.shape == (turns,)
    kl = rows(data, "kl_penalty")
    assert all(row.abs().max() > 0.1 for row in kl)
    pairs = zip(rows(data, GEN), rows(data, REF), strict=True)
    assert_rows_equal(kl, [gen - ref for gen, ref in pairs])
    assert_rows_equal(rows(data, "reward"), [1 - 0.1 * row.unsqueeze(-1) for row in kl])


@pytest.fixture
def scoring(reference) -> RetrieveKL:
    return RetrieveKL("from_collector", reference(), coeff=0.1)


@pytest.fixture
def greedy(tokenizer, policy_model) -> TransformersWrapper:
    return TransformersWrapper(
        policy_model,
        tokenizer=tokenizer,
        generate_kwargs={"max_new_tokens": 5, "do_sample": False},
    )


@pytest.mark.parametrize(
    "mode", [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}]
)
def test_the_dialogs_of_torchrls_collector(chat_env, collect, greedy, mode):
    texts = []
    for cls in (LLMCollector, TorchrlLLMCollector):
        env = chat_env(StepCounter(2))
        collector = collect(env, cls, policy=greedy, **mode)
        batches = [batch.reshape(-1) for batch in collector]
        texts.append([[str(h.full.content) for h in b["history"].unbind(0)] for b in batches])
        assert all(batch["next", "reward"].shape == (4, 1, 1) for batch in batches)
    assert texts[0] == texts[1] and len(texts[0]) == 2


@pytest.mark.parametrize(
    "mode", [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}], ids=str
)
def test_transforms_find_the_policy_through_the_collector(scoring, chat_env, collect, mode):
    batches = list(collect(chat_env(StepCounter(2), scoring), **mode))
    assert len(batches) == 2
    for batch in batches:
        check(batch, 4)


def test_transforms_of_a_pool_find_the_policy_too(reference, chat_env, collect):
    def scored() -> Any:
        transform = RetrieveKL("from_collector", reference(), coeff=0.1)
        return chat_env(StepCounter(2), transform, rows=1)

    options = {"yield_completed_trajectories": True, "dialog_turns_per_batch": 2}
    pool = AsyncEnvPool([scored] * 2, backend="threading", stack="lazy")
    batches = list(collect(pool, track_policy_version=True, **options))
    assert len(batches) == 4
    for batch in batches:
        check(batch, 2)
        assert batch["next", "policy_version"].tolist() == [0, 0]
