"""AsyncCollector: what it shows, where batches go, and what is called around them."""

from __future__ import annotations

import os
import queue
import re
import signal
from functools import partial
from typing import Any

import pytest
import torch
from async_workers import ones
from channel_collector import Says, policy_of
from counting_dialogs import Counting, policy
from sync_workers import canary_policy, weights_of
from tensordict import TensorDictBase
from torchrl.envs import AsyncEnvPool
from torchrl.testing.mocking_classes import CountingEnv
from weights_workers import Ones

from fusedrl import LLMCollector

pytestmark = pytest.mark.usefixtures("forked")

DIALOGS: dict[str, Any] = {
    "collector_class": LLMCollector,
    "dialog_turns_per_batch": 4,
    "total_dialog_turns": 8,
}


def test_verbose_logs_a_line_for_each_batch(make, caplog):
    """With the version and the staleness that the trainer knows."""
    collector = make(
        Ones,
        canary_policy(),
        verbose=True,
        track_policy_version=True,
        prefetch=0,
        total_frames=8,
    )
    with caplog.at_level("INFO", logger="fusedrl"):
        for _ in collector:
            collector.update_policy_weights_(weights_of(2.0))
            # The next batch is there, and has the version that is newest now.
            collector._worker.batch(collector._batches.number, None)
            collector.update_policy_weights_(weights_of(3.0))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == [
        "AsyncCollector: turns 4, version 1, staleness 0",
        "AsyncCollector: turns 8, version 3, staleness 1",
    ]


def test_dialogs_are_logged_in_the_trainer(make, caplog):
    with caplog.at_level("INFO", logger="fusedrl"):
        list(make(Counting, policy, verbose=True, **DIALOGS))
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert lines == ["AsyncCollector: turns 4, ", "AsyncCollector: turns 8, "]


def test_a_progress_bar(make, capsys):
    pytest.importorskip("rich")
    list(make(Counting, policy_of(Says(1)), progress=True, track_policy_version=True, **DIALOGS))
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"8/8 turns, version 1, staleness 0", shown)


def test_quiet_by_default(make, caplog, capsys):
    with caplog.at_level("INFO", logger="fusedrl"):
        list(make(total_frames=8))
    assert not caplog.records and capsys.readouterr().out == ""


def test_turns_go_into_a_queue(make):
    turns: queue.Queue[Any] = queue.Queue()
    assert list(make(Counting, policy, queue=turns, **DIALOGS)) == [None, None]
    seen = [turns.get_nowait()["seen"].item() for _ in range(8)]
    assert turns.empty() and sorted(seen) == [100, 100, 101, 101, 102, 102, 103, 200]


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


def test_a_batch_of_random_frames_is_all_random(make):
    """Of 6 that are asked for there are 8: the third batch is the first of the policy's."""
    options = {"init_random_frames": 6, "total_frames": 16, "frames_per_batch": 4}
    collector = make(partial(CountingEnv, max_steps=100), _seven, **options)
    own = [(batch["action"] == 7).all().item() for batch in collector]
    assert own == [False, False, True, True]


def _seven(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", torch.full((*tensordict.shape, 1), 7, dtype=torch.int32))


def test_a_worker_that_is_killed_while_it_is_waited_for(make):
    """It is told by the end of the process, not by a timeout: there is none here."""
    collector = make(partial(_Killed, str(os.getpid())))
    with pytest.raises(RuntimeError, match="exit code -9"):
        collector.next()
    assert collector.closed


class _Killed(CountingEnv):
    """An environment whose process is killed in its first step."""

    def __init__(self, trainer: str) -> None:
        super().__init__()
        self.trainer = int(trainer)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        assert os.getppid() == self.trainer
        os.kill(os.getpid(), signal.SIGKILL)
        return super()._step(tensordict)
