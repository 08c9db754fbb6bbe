"""RayLLMCollector: dialogs of an actor, whose batches have one version each."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray_dialogs
import ray_models
import torch
from channel_collector import Says, of, policy_of
from counting_dialogs import Counting, Numbers
from ray_dialogs import says
from ray_nodes import living_actors, nodes
from shown import assert_prints, texts
from tensordict import TensorDict
from torchrl.collectors.llm import RayLLMCollector as TorchrlRayLLMCollector
from torchrl.data import LazyStackStorage, RayReplayBuffer
from torchrl.modules.llm import TransformersWrapper

from fusedrl import RayLLMCollector, RayRemoteWeightUpdater
from fusedrl.collectors.ray_llm_collector import DialogActor

pytestmark = pytest.mark.heavy

ray = pytest.importorskip("ray")

PAGE = Path(__file__).parents[2] / "docs/tutorials/ray-cluster.md"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    nodes.start()


@pytest.fixture
def collect() -> Iterator[Callable[..., RayLLMCollector]]:
    made = []

    def collect(env: Any = Counting, **options: Any) -> RayLLMCollector:
        given = {
            "policy_factory": None if "policy" in options else says,
            "dialog_turns_per_batch": 4,
            "track_policy_version": True,
            "num_cpus": 0,
        }
        made.append(RayLLMCollector(env, **(given | options)))
        return made[-1]

    yield collect
    for collector in made:
        collector.shutdown()


def weights_of(version: float) -> TensorDict:
    return TensorDict.from_module(policy_of(Says(version))).data


def actor_of(collector: RayLLMCollector, function: Callable[[Any], Any]) -> Any:
    return ray.get(collector._collector.__ray_call__.remote(function))


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_as_torchrls_with_chats_until_the_last_turn(collect):
    """A tokenizer and a model are sent, and the model's weights after each step."""
    tokenizer = ray_models.tokenizer()
    trained = TransformersWrapper(
        ray_models.policy_model(),
        tokenizer=tokenizer,
        generate=True,
        pad_output=False,
        return_log_probs=True,
        generate_kwargs={"max_new_tokens": 5, "do_sample": False},
    )
    env = partial(ray_dialogs.chat_env, tokenizer)
    collector = collect(env, policy=trained, total_dialog_turns=12)
    assert isinstance(collector, TorchrlRayLLMCollector) and len(collector) == 3
    assert (collector.total_dialog_turns, collector.dialog_turns_per_batch) == (12, 4)
    versions, answers = [], []
    for batch in collector:
        flat = batch.reshape(-1)
        versions.append(flat["next", "policy_version"].tolist())
        answers.append([row.tolist() for row in flat.get(("tokens", "response"), as_list=True)])
        prompts = flat.get(("tokens", "prompt"), as_list=True)
        assert len({len(prompt) for prompt in prompts}) > 1  # ragged
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.mul_(1.5)
        collector.update_policy_weights_(trained)
    assert versions == [[n] * 4 for n in range(3)] and collector.policy_version == 3
    assert answers[0] != answers[1]
    assert collector.next() is None


@pytest.mark.parametrize("sync_iter", [True, False])
def test_each_batch_is_of_the_one_version_that_made_it_under_continuous_updates(collect, sync_iter):
    """The weights, and with them the actions, are their version."""
    collector = collect(sync_iter=sync_iter, dialog_turns_per_batch=20, total_dialog_turns=400)
    ended = threading.Event()
    published = []

    def publish() -> None:
        while not ended.is_set():
            collector.update_policy_weights_(weights_of(len(published) + 1))
            published.append(collector.policy_version)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        batches = [set(of(batch)) for batch in collector]
    finally:
        ended.set()
        thread.join()
    assert len(batches) == 20 and all(len(versions) == 1 for versions in batches)
    versions = [version for (version,) in batches]
    assert versions == sorted(versions) and versions[-1] > 2
    assert published == list(range(1, len(published) + 1))


def test_an_update_comes_after_the_batch_that_was_asked_for_before_it(collect):
    threads = {"max_concurrency": 4, "concurrency_groups": {"beside": 2, "own": 2}}
    collector = collect(sync_iter=False, total_dialog_turns=400, remote_config=threads)
    versions = []
    for number, batch in enumerate(collector, 1):
        versions.append(set(of(batch)))
        collector.update_policy_weights_(weights_of(number))
    assert versions == [{max(batch - 1, 0)} for batch in range(100)]


def test_a_buffer_gets_batches_of_one_version_from_the_background(collect):
    buffer = RayReplayBuffer(
        storage=partial(LazyStackStorage, 10_000), batch_size=3, remote_config={"num_cpus": 0}
    )
    collector = collect(replay_buffer=buffer, dialog_turns_per_batch=6)
    assert collector.next() is None and len(buffer) == 6
    collector.start()
    assert collector.is_running()
    for version in range(1, 20):
        collector.update_policy_weights_(weights_of(version))
    wait_for(lambda: buffer[-1]["policy_version"].item() == 19)
    collector.shutdown()
    rows = buffer[:]
    batches = rows["policy_version"].reshape(-1, 6)
    assert torch.equal(rows["action"].flatten(), batches.flatten())
    assert torch.equal(batches, batches[:, :1].expand(-1, 6))
    buffer.close()


def test_two_collectors_by_one_object_in_the_store(collect, monkeypatch):
    """They also draw different numbers, though their factories set one seed."""
    pair = [collect(policy_factory=ray_dialogs.draws) for _ in range(2)]
    drawn = [collector.next()["action"].flatten().tolist() for collector in pair]
    assert not set(drawn[0]) & set(drawn[1])
    for collector in pair:
        collector.shutdown()
    wait_for(lambda: not living_actors())

    pair = [collect() for _ in range(2)]
    actors = [actor for collector in pair for actor in collector.remote_collectors]
    puts, put = [], ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    RayRemoteWeightUpdater(weights_of(1), actors).update_weights()
    assert len(puts) == 1
    assert [of(collector.next()) for collector in pair] == [[1] * 4] * 2
    pair[0].increment_version()
    assert [collector.policy_version for collector in pair] == [2, 1]


def test_a_batch_that_was_begun_is_handed_out_later(collect):
    """It is not lost where a loop ends, nor where Ctrl-C meets the wait for it."""
    collector = collect(sync_iter=False, total_dialog_turns=12)
    for batch in collector:
        assert batch["seen"].flatten().tolist() == [100, 101, 100, 101]
        break
    pid = actor_of(collector, lambda _: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(0.5, signal.raise_signal, (signal.SIGINT,))
    timer.start()
    batches = []
    with pytest.raises(KeyboardInterrupt):  # a second batch may be there, a third one is not
        batches.extend(iter(collector.next, None))
    os.kill(pid, signal.SIGCONT)
    batches.extend(collector)
    seen = [batch["seen"].flatten().tolist() for batch in batches]
    assert seen == [[102, 200, 102, 103], [201, 202, 200, 201]]


def test_updates_are_refused_or_go_through_an_updater_in_the_actor(collect):
    collector = collect(remote_config={"num_cpus": 0}, num_cpus=8)
    for weights, told in (
        (None, "policy_or_weights: expected weights, got none"),
        (TensorDict({"other": torch.ones(1)}), "other: expected no such entry"),
    ):
        with pytest.raises(ValueError, match=told):
            collector.update_policy_weights_(weights)
    with pytest.raises(ValueError, match="weights"):
        collector.update_policy_weights_(weights_of(1), weights=weights_of(2))
    assert collector.policy_version == 0
    for version, form in enumerate(("weights", "policy", "policy_or_weights"), 1):
        collector.update_policy_weights_(**{form: policy_of(Says(version))})
        assert of(collector.next()) == [version] * 4
    collector.update_policy_weights_(policy_of(Says(4)).state_dict())
    assert of(collector.next()) == [4] * 4
    collector.weight_updater = ray_dialogs.Tenfold()
    collector.update_policy_weights_(weights_of(3))
    batch = collector.next()
    assert batch["action"].unique().tolist() == [30]
    assert batch["policy_version"].unique().tolist() == [5]


class TestErrors:
    def test_of_what_is_elsewhere_or_over(self, collect):
        collector = collect(sync_iter=False)
        assert len(list(zip(range(2), collector, strict=False))) == 2  # another one is on its way
        for name in ("reset", "set_seed", "state_dict", "load_state_dict"):
            with pytest.raises(NotImplementedError, match=rf"^{name}: .*remote_collectors\[0\]"):
                getattr(collector, name)()
        with pytest.raises(NotImplementedError, match=r"^weight_updater: .*get_distant_attr"):
            collector.weight_updater  # noqa: B018
        collector.shutdown()
        for use in (collector.next, collector.start, collector.increment_version):
            with pytest.raises(RuntimeError, match="got one that was shut down"):
                use()

    def test_of_an_environment(self, collect):
        collector = collect(ray_dialogs.Failing, sync_iter=False, dialog_turns_per_batch=2)
        batches = iter(collector)
        assert next(batches)["seen"].flatten().tolist() == [100, 100]
        next(batches)
        with pytest.raises(LookupError, match=r"(?s)ray_dialogs\.py.*no third step"):
            next(batches)
        with pytest.raises(RuntimeError, match="got one that was shut down"):
            collector.next()

    def test_of_an_actor_that_cannot_be_made_or_dies(self, collect):
        collector = collect(policy_factory=ray_dialogs.no_checkpoint)
        with pytest.raises(ray.exceptions.RayActorError, match=r"(?s)LookupError.*no such"):
            collector.next()
        collector = collect()
        pid = actor_of(collector, lambda _: os.getpid())
        os.kill(pid, signal.SIGKILL)
        for use in (collector.next, partial(collector.update_policy_weights_, weights_of(1))):
            with pytest.raises(ray.exceptions.RayActorError, match=str(pid)):
                use()
        for _ in range(2):
            collector.shutdown()
        wait_for(lambda: not living_actors())


def test_an_update_waits_for_the_end_of_the_batch_however_long_it_takes(monkeypatch):
    """What runs in the actor, without Ray."""
    monkeypatch.setattr("fusedrl.collectors.versions.WAIT_S", 0.01)
    policy, updates = policy_of(Says()), []

    def update() -> None:
        actor.update_policy_weights_(weights_of(1))
        actor.increment_version()

    def begin(*_: Any) -> None:
        if not updates:
            updates.append(threading.Thread(target=update))
            updates[0].start()
        time.sleep(0.05)

    policy.module.register_forward_hook(begin)
    actor = DialogActor(
        0, env=Numbers(), policy=policy, dialog_turns_per_batch=8, track_policy_version=True
    )
    assert of(actor.next()) == [0] * 8
    updates[0].join()
    assert actor.policy_version == 2 and set(actor.next()["action"].flatten().tolist()) == {1}
    actor.shutdown()


def test_the_tutorial_runs(capsys):
    """Its program, which finds the tests' cluster instead of starting one."""
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, PAGE, "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert_prints(texts(PAGE, "python"), printed, figures=False)
    assert [line.split("]", 1)[1] for line in printed.splitlines()] == [") [1]"] * 2 + [
        ") [2]",
        ") [3]",
    ]
