"""AsyncCollector: what it shows, where batches go, and what is called around them."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
from async_workers import ones
from counting_dialogs import Counting, policy
from tensordict import TensorDictBase
from torchrl.collectors import Collector
from torchrl.envs import AsyncEnvPool
from torchrl.testing.mocking_classes import CountingEnv

from fusedrl import LLMCollector

from .ends import until

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("forked")]

DIALOGS: dict[str, Any] = {
    "collector_class": LLMCollector,
    "frames_per_batch": None,  # the other names of these two sizes
    "total_frames": -1,
    "dialog_turns_per_batch": 4,
    "total_dialog_turns": 8,
}


@pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
def test_a_pool_of_environments_in_the_worker(make, backend):
    def pool() -> AsyncEnvPool:
        envs: list[Any] = [partial(Counting, None, turns) for turns in (2, 3)]
        return AsyncEnvPool(envs, backend=backend, stack="lazy")

    collector = make(
        pool,
        policy,
        track_policy_version=True,
        yield_completed_trajectories=True,
        collector_class=LLMCollector,
        frames_per_batch=None,
        dialog_turns_per_batch=2,
        total_dialog_turns=10,
    )
    batches = list(collector)
    assert sum(map(len, batches)) >= 5
    assert all(len(batch) in (2, 3) and batch["next", "done"][-1] for batch in batches)
    assert all((batch["policy_version"] == 0).all() for batch in batches)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(
    "begin_anew",
    [
        lambda collector: collector.reset(),
        lambda collector: collector.set_seed(1),
        lambda collector: collector.load_state_dict(collector.state_dict()),
    ],
    ids=["reset", "seed", "state"],
)
def test_every_turn_arrives_after_what_begins_anew(make, prefetch, begin_anew):
    collector = make(Counting, policy, **DIALOGS | {"total_dialog_turns": 40, "prefetch": prefetch})
    turns = 0
    for batch in collector:
        turns += batch.numel()
        if turns in (8, 16):
            until(lambda: collector._worker._batches.qsize() or not prefetch)
            begin_anew(collector)
    assert turns == 40


class Named(Collector):
    def __init__(self, env: Any, *, name: str, **options: Any) -> None:
        super().__init__(env, **options)
        self.name = name


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        (Named, {"name": "a", "max_frames_per_traj": 3}, "name"),
        (partial(Named, name="a"), {"max_frames_per_traj": 3}, "name"),
        (lambda env, **options: Named(env, name="a", **options), {"device": "cpu"}, "name"),
        (partial(LLMCollector, flatten_data=True), {"total_dialog_turns": 8}, "flatten_data"),
    ],
)
def test_the_callers_class_gets_its_arguments(make, kind, options, name):
    dialogs = "total_dialog_turns" in options
    env, chosen = (Counting, policy) if dialogs else (CountingEnv, ones)
    collector = make(env, chosen, collector_class=kind, **options)
    assert collector.next().shape == (4,)
    assert collector.get_distant_attr(name) == [True if dialogs else "a"]


@pytest.mark.parametrize("options", [{}, DIALOGS], ids=["frames", "dialogs"])
def test_what_is_called_in_the_worker(make, tmp_path, options):
    said = tmp_path / "said"

    def say(what: str, batch: TensorDictBase | None = None) -> None:
        with said.open("a") as file:
            file.write(f"{what} {os.getpid()} {'' if batch is None else batch.numel()}\n")

    collector = make(
        Counting if options else CountingEnv,
        policy if options else ones,
        init_fn=partial(say, "init"),
        pre_collect_hook=partial(say, "before"),
        post_collect_hook=partial(say, "after"),
        **({"total_frames": 8} | options),
    )
    pid = collector.procs[0].pid
    list(collector)
    once = [f"before {pid} ", f"after {pid} 4"]
    assert said.read_text().splitlines() == [f"init {pid} ", *once, *once]
