"""Dialogs that are scored with the policy as they are collected, and what they should score.

Weights of version ``v`` are those of one of a few models, by turns, so that two versions that
follow each other give very different log-probs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from async_chats import loader
from torchrl.envs import EnvBase, StepCounter, TransformedEnv
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer
from torchrl.modules.llm import TransformersWrapper
from transformers import LlamaConfig, LlamaForCausalLM
from transforms.conftest import OneReward

from fusedrl import RetrieveKL, RetrieveLogProb

MODELS = 4
ROWS = 4  # dialogs side by side, whose turns are one call of the policy
TURNS = 12 * ROWS


def model(tokenizer: Any, seed: int) -> Any:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    made = LlamaForCausalLM(config).eval()
    # Not torch.manual_seed: another thread, of a test before, may draw from the same numbers.
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in made.parameters():
            weight.normal_(std=0.5, generator=numbers)
    return made


def model_of(tokenizer: Any, version: int) -> Any:
    return model(tokenizer, version % MODELS)


def generating(tokenizer: Any, made: Any, device: Any = None) -> TransformersWrapper:
    return TransformersWrapper(
        made.to(device),
        tokenizer=tokenizer,
        device=device,
        input_mode="history",
        generate=True,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 2, "do_sample": True},
    )


def scored_chats(tokenizer: Any, rows: int = ROWS, device: Any = None) -> EnvBase:
    """Dialogs of two turns, with the KL between the collector's policy and another model."""
    reference = TransformersWrapper(
        model(tokenizer, 100).to(device),
        tokenizer=tokenizer,
        device=device,
        input_mode="history",
        generate=False,
        return_log_probs=True,
        log_probs_key="ref_log_probs",
    )
    env = TransformedEnv(ChatEnv(batch_size=(rows,), tokenizer=tokenizer))
    parts = (DataLoadingPrimer(dataloader=loader(rows)), OneReward(), StepCounter(2))
    for part in (*parts, RetrieveKL("from_collector", reference, add_to_reward=False)):
        env.append_transform(part)
    return env


@contextmanager
def published(tokenizer: Any, publish: Any, first: int = 1, device: Any = None) -> Iterator[None]:
    """Versions one after the other, from a thread: ``publish(module, version)``."""
    over = threading.Event()
    models = [model_of(tokenizer, version).to(device) for version in range(MODELS)]
    errors = []

    def run() -> None:
        version = first
        try:
            while not over.is_set():
                publish(models[version % MODELS], version)
                version += 1
                time.sleep(0.002)  # a turn takes many times as long
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not errors, errors


class Recomputed:
    """Compares what turns say with what the weights of their version give."""

    def __init__(self, tokenizer: Any, device: Any = None) -> None:
        self._scorers = []
        for version in range(MODELS):
            wrapper = TransformersWrapper(
                model_of(tokenizer, version).to(device),
                tokenizer=tokenizer,
                device=device,
                input_mode="history",
                generate=False,
                return_log_probs=True,
            )
            self._scorers.append(RetrieveLogProb(wrapper, assistant_only=True))
        self.turns = 0
        self.versions: set[int] = set()
        self.wrong: list[tuple[int, float]] = []

    def check(self, batch: Any) -> None:
        for row in batch.reshape(-1).unbind(0):
            version = int(row["next", "policy_version"])
            assert version == int(row["policy_version"])
            data = row.select("history").clone()
            scored = self._scorers[version % MODELS](data.unsqueeze(0))
            expected = scored.get(("log_probs", "full"), as_list=True)[0]
            got = row.get(("next", "log_probs", "full"))
            off = float((got.flatten() - expected.to(got.device).flatten()).abs().max())
            self.turns += 1
            self.versions.add(version)
            if not off < 1e-4:
                self.wrong.append((version, off))


def check_versions(
    collector: Any,
    tokenizer: Any,
    publish: Callable[[Any, int], Any],
    first: int = 2,
    turns: int = TURNS,
    by_batch: bool = False,
    device: Any = None,
) -> list[Any]:
    """Collect while versions are published all the time, and recompute every turn.

    Args:
        by_batch: whether each batch has one version, where others have one for each turn.
    """
    recomputed = Recomputed(tokenizer, device)
    batches = []
    try:
        with published(tokenizer, publish, first, device):
            for batch in collector:
                batches.append(batch.copy())
                if sum(batch.numel() for batch in batches) >= turns:
                    break
    finally:
        collector.shutdown()
    for batch in batches:
        recomputed.check(batch)
    if by_batch:
        assert {len(batch["next", "policy_version"].unique()) for batch in batches} == {1}
    least = len(batches) // 2 if by_batch else 5
    assert recomputed.turns >= turns and len(recomputed.versions) > least
    assert recomputed.wrong == [], recomputed.wrong
    return batches
