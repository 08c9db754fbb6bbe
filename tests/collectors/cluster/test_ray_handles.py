"""RayLLMCollector in other processes: handles of one collector, and a GRPO script that sends it.

The script has the calls of torchrl's recipes for GRPO: the collector and the buffer are made in one
process, a Ray task trains with them, and the buffer penalises what is written.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import ray_dialogs
import ray_models
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting
from ray_dialogs import runs, wait_for
from ray_nodes import nodes
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, RayReplayBuffer, ReplayBuffer, SamplerWithoutReplacement
from torchrl.objectives.llm import MCAdvantage

from fusedrl import KLRewardTransform, RayLLMCollector, RayRemoteWeightUpdater

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    nodes.start()


def make(env: Any = Counting, **options: Any) -> RayLLMCollector:
    given = {
        "policy_factory": None if "policy" in options else ray_dialogs.says,
        "dialog_turns_per_batch": 4,
        "track_policy_version": True,
        "num_cpus": 0,
    }
    return RayLLMCollector(env, **(given | options))


@pytest.fixture(scope="module")
def pair() -> Iterator[RayLLMCollector]:
    """Two actors, and tasks that have handles of them."""
    with make(num_collectors=2) as collector:
        yield collector


def in_a_task(work: Callable[..., Any], *args: Any) -> Any:
    return ray.get(ray.remote(num_cpus=0)(work).remote(*args))


def weights_of(version: float) -> TensorDict:
    return TensorDict.from_module(policy_of(Says(version))).data


def pids(collector: RayLLMCollector) -> list[int]:
    where = [actor.__ray_call__.remote(lambda _: os.getpid()) for actor in collector.actors]
    return ray.get(where)


def turns_of(batch: Any) -> list[tuple[int, int]]:
    """The dialog and the observation of each turn."""
    flat = batch.reshape(-1)
    ids, seen = flat["collector", "traj_ids"].flatten(), flat["seen"].flatten()
    return list(zip(ids.tolist(), seen.tolist(), strict=True))


def versions(batch: Any) -> list[int]:
    return batch["next", "policy_version"].flatten().tolist()


class TestHandles:
    def test_torchrls_name_of_the_actor(self, pair):
        assert ray.get(pair._collector.is_initialized.remote()) is True
        assert ray.get(pair._collector.getattr_policy.remote("in_keys")) == ["seen"]

    def test_a_handle_collects_updates_and_counts(self, pair):
        def work(collector: RayLLMCollector) -> list[Any]:
            version = collector.policy_version
            collector.update_policy_weights_(weights_of(version + 1))
            told = [of(collector.next())]
            collector.increment_version()
            told += [versions(batch) for batch, _ in zip(collector, range(2), strict=False)]
            tracker = collector.policy_version_tracker
            return [
                *told,
                collector.policy_version,
                tracker.version,
                tracker.span(collector.next()),
            ]

        before = pair.policy_version
        told = in_a_task(work, pair)
        newest = before + 2
        assert told[0] == [before + 1] * 4
        assert told[1:] == [[newest] * 4, [newest] * 4, newest, newest, (newest, newest)]
        assert pair.policy_version == pair.policy_version_tracker.version == newest
        pair.update_policy_weights_(weights_of(newest + 1))
        assert of(pair.next()) == [newest + 1] * 4

    def test_each_batch_comes_to_one_of_those_who_iterate(self):
        def rest(collector: RayLLMCollector) -> list[tuple[int, int]]:
            return [turn for batch in collector for turn in turns_of(batch)]

        with make(total_dialog_turns=40) as collector:
            task = ray.remote(num_cpus=0)(rest).remote(collector)
            turns = rest(collector) + ray.get(task)
            assert len(turns) == len(set(turns)) == 40
            assert list(collector) == [] and collector.state_dict()["frames"] == 40

    def test_what_a_handle_does_not_have(self, pair):
        """Weights and updaters of the process that made the collector: it would have copies."""

        def work(collector: RayLLMCollector) -> list[str]:
            with pytest.raises(ValueError, match="expected weights, got none") as caught:
                collector.update_policy_weights_()
            collector.update_policy_weights_(weights_of(7))
            return [str(caught.value), repr(collector.weight_updater)]

        updater = RayRemoteWeightUpdater(weights_of(0))
        with make(policy=policy_of(Says(1)), weight_updater=updater) as collector:
            _, has = in_a_task(work, collector)
            assert has == "None" and collector.policy_version == 1
            assert collector.next()["action"].flatten().tolist() == [7] * 4

    def test_a_buffer_of_this_process_keeps_the_collector_here(self):
        buffer = ReplayBuffer(storage=LazyStackStorage(100))
        with make(replay_buffer=buffer) as collector:
            with pytest.raises(TypeError, match="replay_buffer: expected a RayReplayBuffer"):
                cloudpickle.dumps(collector)
            assert collector.next() is None and len(buffer) == 4

    def test_whoever_shuts_down_ends_it_for_all(self):
        collector = make()
        (pid,) = pids(collector)
        in_a_task(lambda handle: handle.shutdown(), collector)
        wait_for(lambda: not runs(pid))
        with pytest.raises(ray.exceptions.RayActorError):
            collector.increment_version()
        collector.shutdown()
        collector.shutdown()
        with pytest.raises(RuntimeError, match="got one after shutdown"):
            in_a_task(turns_of, collector)

    def test_it_ends_with_the_last_handle(self):
        collector = make()
        (pid,) = pids(collector)
        in_a_task(lambda handle: handle.next() is None, collector)
        assert of(collector.next()) == [0] * 4
        del collector
        wait_for(lambda: not runs(pid))


class TestAllOrNothing:
    def test_an_update_that_all_actors_refuse_has_no_number(self):
        with make(weight_updater=ray_dialogs.Tenfold, num_collectors=2) as collector:
            collector.update_policy_weights_(weights_of(1))
            with pytest.raises(KeyError):
                collector.update_policy_weights_(TensorDict(other=torch.ones(1)))
            assert collector.policy_version == 1
            collector.update_policy_weights_(weights_of(2))
            batch = collector.next()
            assert versions(batch) == [2] * 4 and batch["action"].flatten().tolist() == [20] * 4

    def test_ctrl_c_while_it_shuts_down(self):
        """Then shutting down again ends the actors."""
        collector = make()
        (pid,) = pids(collector)
        os.kill(pid, signal.SIGSTOP)  # it does not answer
        stop = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(KeyboardInterrupt):
                collector.shutdown()
        finally:
            signal.signal(signal.SIGALRM, stop)
        collector.shutdown()
        wait_for(lambda: not runs(pid))


def grpo_env() -> Any:
    """Questions that are asked once, with a reward that depends on the answer."""
    from torchrl.envs import StepCounter

    env = ray_dialogs.dataset_env()
    return env.append_transform(ray_dialogs.LengthReward()).append_transform(StepCounter(1))


@pytest.mark.parametrize("script", ["sync", "async"])
def test_a_grpo_script_whose_task_trains(script):
    coef = 0.1
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, 8 if script == "sync" else 100),
        sampler=partial(SamplerWithoutReplacement, shuffle=script == "async"),
        transform_factory=partial(MCAdvantage, grpo_size=2),
        batch_size=4,
        remote_config={"num_cpus": 0},
    )
    penalty = KLRewardTransform(
        ref_model_factory=ray_models.tokens_reference,
        coef=coef,
        use_ray_service=True,
    )
    buffer.append_transform(penalty, invert=True)
    trained = ray_dialogs.answering()
    collector = RayLLMCollector(
        env=grpo_env,
        policy=trained,
        dialog_turns_per_batch=4,
        total_dialog_turns=16,
        replay_buffer=buffer,
        track_policy_version=True,
        remote_config={"num_cpus": 0},
        sync_iter=script == "sync",
        yield_only_last_steps=False,
        verbose=False,
    )
    assert ray.get(collector._collector.is_initialized.remote())
    (pid,) = pids(collector)
    train = {"sync": train_in_steps, "async": train_beside}[script]
    told = in_a_task(train, buffer.client(), [collector], trained)
    assert told["written"] == 16 and told["sampled"] >= 4
    assert told["newest"] >= 1 and told["seen"] <= told["newest"]
    for reward, kl, answers in told["rows"]:
        assert kl.abs().max() > 0.05
        torch.testing.assert_close(reward, answers - coef * kl)
    wait_for(lambda: not runs(pid))
    buffer.close()


def train_in_steps(buffer: Any, collectors: list[Any], policy: Any) -> dict[str, Any]:
    """A step for each batch that is collected, as in torchrl's ``grpo-sync.py``."""
    (collector,) = collectors
    told = {"rows": [], "sampled": 0, "seen": 0}
    step = ray_dialogs.GrpoStep(policy)
    collector.update_policy_weights_(step.weights())
    for data in collector:
        assert data is None
        for batch in buffer:
            step(batch, told)
        collector.update_policy_weights_(step.weights())
        buffer.empty(empty_write_count=False)
    told |= {"written": buffer.write_count, "newest": collector.policy_version}
    collector.shutdown()
    return told


def train_beside(buffer: Any, collectors: list[Any], policy: Any) -> dict[str, Any]:
    """Steps while the collector goes on, as in torchrl's ``grpo-async.py``."""
    told = {"rows": [], "sampled": 0, "seen": 0}
    step = ray_dialogs.GrpoStep(policy)
    for collector in collectors:
        collector.start()
        assert collector.is_running()
    while all(collector.is_running() for collector in collectors):
        if buffer.write_count >= 4:
            step(buffer.sample(4), told)
            for collector in collectors:
                collector.update_policy_weights_(step.weights())
        time.sleep(0.01)
    step(buffer[:], told)
    for collector in collectors:
        collector.update_policy_weights_(step.weights())
    told |= {"written": buffer.write_count, "newest": collectors[0].policy_version}
    for collector in collectors:
        collector.shutdown()
    return told
