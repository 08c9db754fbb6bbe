"""RayLLMCollector: what it is given, where no Ray runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray_dialogs
import torch
import torch.distributed as dist
from counting_dialogs import Counting
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fusedrl import RayLLMCollector, patch_torchrl
from fusedrl.collectors.cluster.options import RayOptions

ray = pytest.importorskip("ray")


@pytest.fixture
def no_ray(monkeypatch):
    """It is not started."""

    def init(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("Ray was touched")

    monkeypatch.setattr(ray, "is_initialized", init)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"policy": ray_dialogs.says(), "policy_factory": ray_dialogs.says}, "policy_factory"),
        ({"dialog_turns_per_batch": None}, "dialog_turns_per_batch: expected a number"),
        ({"dialog_turns_per_batch": 0}, "dialog_turns_per_batch: expected 1 or more"),
        ({"total_dialog_turns": 0}, "total_dialog_turns: expected 1 or more"),
        ({"num_collectors": 0}, "num_collectors: expected 1 or more"),
        ({"num_collectors": True}, "num_collectors: expected a whole number"),
        ({"num_collectors": 3, "remote_config": [{}] * 2}, "remote_config: expected a list of"),
        ({"env": [Counting] * 2, "remote_config": [{}]}, "remote_config: expected a list of 2"),
        ({"yield_only_last_steps": True, "flatten_data": True}, "flatten_data: expected None"),
        ({"track_policy_version": 3}, "track_policy_version: expected a bool"),
        ({"channel_mode": "half"}, "channel_mode: expected 'alias' or 'copy'"),
        ({"max_staleness": 1, "track_policy_version": False}, "max_staleness: expected int"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": 0}, "timeout: expected more than 0 seconds"),
    ],
)
def test_what_is_refused_before_ray_is_touched(no_ray, options, told):
    given: dict[str, Any] = {"env": Counting, **options}
    if told == "policy_factory":
        with pytest.raises(TypeError, match="got both"):
            RayLLMCollector(given.pop("env"), dialog_turns_per_batch=2, **given)
        return
    defaults = {"policy_factory": None if "policy" in options else ray_dialogs.says}
    defaults |= {"dialog_turns_per_batch": 4, "track_policy_version": True}
    with pytest.raises((TypeError, ValueError), match=told):
        RayLLMCollector(given.pop("env"), **(defaults | given))


@pytest.fixture
def sharded() -> Iterator[Any]:
    """A policy that one of two ranks has a part of, where the other never comes."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        policy = ray_dialogs.says()
        mesh, value = init_device_mesh("cpu", (2,)), policy.module.value
        part = DTensor.from_local(value.data.reshape(1), mesh, [Shard(0)], run_check=False)
        policy.module.value = torch.nn.Parameter(part)
        yield policy
    finally:
        dist.destroy_process_group()


def test_a_model_in_parts_on_several_ranks_is_refused_and_not_waited_for(no_ray, sharded):
    told = "policy: expected whole .*value' in parts on 2 ranks"
    for policy in (sharded, sharded.module):
        with pytest.raises(ValueError, match=told):
            RayLLMCollector(Counting, policy=policy, dialog_turns_per_batch=4)


@pytest.mark.parametrize(
    ("total", "shares"),
    [
        (10, [4, 3, 3]),
        (3e0, [1, 1, 1]),
        (-1, [-1] * 3),
        (None, [-1] * 3),
        (float("inf"), [-1] * 3),
    ],
)
def test_turns_are_shared_out_or_never_end(total, shares):
    options = RayOptions(
        Counting, dialog_turns_per_batch=4, total_dialog_turns=total, num_collectors=3
    )
    assert [one["total_dialog_turns"] for one in options.for_each(0)] == shares


def test_torchrls_name():
    import torchrl.collectors.llm

    with patch_torchrl(["RayLLMCollector"]):
        assert torchrl.collectors.llm.RayLLMCollector is RayLLMCollector
