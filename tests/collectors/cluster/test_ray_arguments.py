"""RayLLMCollector: what it is given, where no Ray runs."""

from __future__ import annotations

from typing import Any

import pytest
import ray_dialogs
from counting_dialogs import Counting

from fusedrl import PolicyVersion, RayLLMCollector, patch_torchrl
from fusedrl.collectors.cluster import ray_llm_collector

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
        ({"total_dialog_turns": 2, "num_collectors": 3}, "one for each of 3 actors, got 2"),
        ({"num_collectors": 0}, "num_collectors: expected a positive number, got 0"),
        ({"num_collectors": True}, "num_collectors: expected a positive number, got True"),
        ({"num_collectors": 3, "remote_config": [{}] * 2}, "remote_config: expected a list of"),
        ({"env": [Counting] * 2, "remote_config": [{}]}, "remote_config: expected a list of 2"),
        ({"yield_only_last_steps": True, "flatten_data": True}, "flatten_data: expected None"),
        ({"track_policy_version": 3}, "track_policy_version: expected a bool"),
        (
            {"policy": ray_dialogs.says(), "track_policy_version": PolicyVersion("uuid")},
            "track_policy_version: expected integer versions",
        ),
        ({"channel_mode": "half"}, "channel_mode: expected 'alias' or 'copy'"),
        ({"max_staleness": 1, "track_policy_version": False}, "max_staleness: expected int"),
        ({"timeout": -1}, "timeout"),
        ({"remote_config": {"max_restarts": 1}}, "remote_config: expected max_restarts=0"),
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


class Started(Exception):
    """What the actors would have been given, each for itself."""


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
def test_turns_are_shared_out_or_never_end(monkeypatch, total, shares):
    def start(actors: Any, kind: type, options: Any, shared: Any, own: list[Any]) -> None:
        raise Started([one.arguments["total_dialog_turns"] for one in own])

    monkeypatch.setattr(ray_llm_collector.Actors, "start", start)
    monkeypatch.setattr(ray_llm_collector, "start_ray", lambda config: None)
    with pytest.raises(Started) as caught:
        RayLLMCollector(
            Counting,
            policy_factory=ray_dialogs.says,
            dialog_turns_per_batch=4,
            total_dialog_turns=total,
            num_collectors=3,
        )
    assert caught.value.args == (shares,)


def test_torchrls_name():
    import torchrl.collectors.llm

    with patch_torchrl(["RayLLMCollector"]):
        assert torchrl.collectors.llm.RayLLMCollector is RayLLMCollector
