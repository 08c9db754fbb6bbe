"""One version from the policy's call to the last transform of the step, in actors of Ray."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from one_version import ROWS, check_versions, generating, model_of, scored_chats
from ray_nodes import nodes

from fusedrl import RayLLMCollector

pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    nodes.start()


# An actor's policy follows a channel as that of an LLMCollector does, which is tested with both.
@pytest.mark.parametrize("mode", ["alias", pytest.param("copy", marks=pytest.mark.slow)])
def test_turns_of_actors(tokenizer, mode):
    collector = RayLLMCollector(
        partial(scored_chats, tokenizer),
        policy=generating(tokenizer, model_of(tokenizer, 0)),
        dialog_turns_per_batch=4 * ROWS,
        channel_mode=mode,
        track_policy_version=True,
        num_cpus=0,
    )

    def publish(module: Any, version: int) -> None:
        collector.update_policy_weights_(module)
        assert collector.policy_version == version

    check_versions(collector, tokenizer, publish, first=1)
