"""Dialogs of a policy on a GPU, whose weights come through a channel. ``make gpu`` runs them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from one_version import ROWS, check_versions, generating, model_of, scored_chats

from fusedrl import AsyncCollector, ChannelWeightSyncScheme, LLMCollector, WeightChannel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DEVICE = "cuda"


def check_device(batches: Any) -> None:
    rows = [row for batch in batches for row in batch.reshape(-1).unbind(0)]
    assert {row["next", "log_probs", "full"].device.type for row in rows} == {DEVICE}
    assert all(bool(row["next", "log_probs", "full"].isfinite().all()) for row in rows)


@pytest.mark.parametrize("mode", ["alias", "copy"])
def test_llm_collector_with_a_channel(tokenizer, mode):
    with WeightChannel.create(model_of(tokenizer, 0).to(DEVICE), slots=8, timeout=60) as channel:
        channel.publish(model_of(tokenizer, 1).to(DEVICE), 1)
        collector = LLMCollector(
            scored_chats(tokenizer, device=DEVICE),
            policy=generating(tokenizer, model_of(tokenizer, 0), DEVICE),
            dialog_turns_per_batch=4 * ROWS,
            channel=channel.handle,
            channel_mode=mode,
            track_policy_version=True,
        )
        check_device(check_versions(collector, tokenizer, channel.publish, device=DEVICE))


def test_a_process_of_its_own(tokenizer):
    scheme = ChannelWeightSyncScheme(mode="copy")
    collector = AsyncCollector(
        partial(scored_chats, tokenizer, device=DEVICE),
        generating(tokenizer, model_of(tokenizer, 1), DEVICE),
        collector_class=LLMCollector,
        dialog_turns_per_batch=4 * ROWS,
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
    )
    policies = {}

    def publish(module: Any, version: int) -> None:
        sent = policies.setdefault(id(module), generating(tokenizer, module, DEVICE))
        scheme.send(sent, version=version)

    check_device(check_versions(collector, tokenizer, publish, device=DEVICE))


def test_the_loop_of_the_readme(tokenizer):
    policy = generating(tokenizer, model_of(tokenizer, 1), DEVICE)
    with AsyncCollector(
        partial(scored_chats, tokenizer, device=DEVICE),
        policy,
        collector_class=LLMCollector,
        dialog_turns_per_batch=2 * ROWS,
        total_dialog_turns=8 * ROWS,
        track_policy_version=True,
    ) as collector:
        batches = []
        for batch in collector:
            batches.append(batch)
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.mul_(0.99)
            collector.update_policy_weights_()
        assert sum(batch.numel() for batch in batches) == 8 * ROWS
        assert collector.policy_version == 1 + len(batches)
        versions = torch.cat([batch["next", "policy_version"].flatten() for batch in batches])
        assert len(versions.unique()) > 1
    check_device(batches)  # which were kept for longer than their worker
