"""An ``AsyncCollector`` whose worker has a vLLM engine, with weights out of a channel."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from engine_policies import checked, dialogs, policy_in, versions

from fusedrl import AsyncCollector, ChannelWeightSyncScheme, LLMCollector, WeightChannel

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "by", ["policy", *(pytest.param(by, marks=pytest.mark.slow) for by in ("scheme", "channel"))]
)
def test_a_worker_makes_the_engine_and_follows(tmp_path, by):
    models = versions(tmp_path, 3)
    scheme, channel = ChannelWeightSyncScheme(), WeightChannel.create(models[0])
    how: dict[str, Any]
    if by == "policy":  # the trainer's, whose weights are sent
        how = {"policy": models[1]}
    elif by == "scheme":
        scheme.init_on_sender(model_id="policy", model=models[1])
        how = {"weight_sync_schemes": {"policy": scheme}}
    else:
        how = {"channel": channel.handle}
        channel.publish(models[1])
    with (
        channel,
        AsyncCollector(
            partial(dialogs, tmp_path),
            policy_factory=partial(policy_in, tmp_path),
            collector_class=LLMCollector,
            dialog_turns_per_batch=4,
            total_dialog_turns=-1,
            track_policy_version=True,
            prefetch=0,
            timeout=120.0,
            **how,
        ) as collector,
    ):
        batches = iter(collector)
        assert checked(next(batches), models) == [1] * 4
        if by == "channel":
            channel.publish(models[2])
        else:
            collector.update_policy_weights_(models[2])
        assert collector.policy_version == 2
        assert checked(next(batches), models) == [2] * 4
    scheme.shutdown()
