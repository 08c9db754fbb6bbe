"""LLMCollector beside torchrl's: the same batches of the same environments and policies.

torchrl's resets the environment once when it is made and again for the first batch, so its
environments start one dialog back here. It lost the trajectory ids, which torchrl's ``Collector``
has.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from counting_dialogs import Counting, policy
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.collectors import Collector
from torchrl.collectors.llm import LLMCollector as TorchrlLLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, SerialEnv

from fusedrl import LLMCollector

IDS = ("collector", "traj_ids")
COMPLETED = {"yield_completed_trajectories": True}
LAST = {"yield_only_last_steps": True}
MODES = {
    "turns": {},
    "flat": {"flatten_data": True},
    "reset": {"reset_at_each_iter": True},
    "completed": COMPLETED,
    "completed, not flat": COMPLETED | {"flatten_data": False},
    "last": LAST,
}


def environment(make: Any, one_back: bool) -> Any:
    """With its first dialog as number 1 when the collector comes to it."""
    env = make()
    if one_back:
        env.dialog -= 1
    return env


def collect(cls: Any, env: Any, **options: Any) -> tuple[list[Any], list[int], Any]:
    """Every batch, the turns charged by then, and the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # sizes that are no multiples
        collector = cls(env, policy=policy, **options)
    batches, charged = [], []
    for batch in collector:
        batches.append(batch)
        charged.append(collector._frames)
    return batches, charged, collector


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    assert type(ours) is type(theirs) is LazyStackedTensorDict
    assert (ours.shape, ours.device, ours.stack_dim) == (
        theirs.shape,
        theirs.device,
        theirs.stack_dim,
    )
    keys = set(map(str, ours.keys(True)))
    assert keys - {"collector", str(IDS)} == set(map(str, theirs.keys(True)))
    for key in ("seen", "action", "done", "terminated", ("next", "reward"), ("next", "done")):
        x, y = ours.get(key), theirs.get(key)
        assert x.dtype == y.dtype and torch.equal(x, y), key
    for key in ("text", ("next", "text")):
        assert ours.get(key).tolist() == theirs.get(key).tolist()


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("rows", "wanted", "total"), [(1, 3, 12), (2, 4, 24), (3, 7, 40), (4, 1, 29)]
)
def test_batches_order_and_turns_charged(mode, lazy, rows, wanted, total):
    options = {"dialog_turns_per_batch": wanted, "total_dialog_turns": total} | mode
    if mode.get("reset_at_each_iter"):
        options |= {"dialog_turns_per_batch": 4 * rows, "total_dialog_turns": 12 * rows}
    envs = [environment(lambda: Counting(rows, 2, lazy), back) for back in (False, True)]
    ours, charged, mine = collect(LLMCollector, envs[0], **options)
    theirs, torchrls, other = collect(TorchrlLLMCollector, envs[1], **options)
    assert charged == torchrls
    assert envs[0].steps == envs[1].steps and envs[0].resets == envs[1].resets - 1
    assert len(ours) == len(theirs) > 1
    for x, y in zip(ours, theirs, strict=True):
        assert_same(x, y)
    for name in ("dialog_turns_per_batch", "total_dialog_turns", "frames_per_batch"):
        assert getattr(mine, name) == getattr(other, name)
    assert mine.env.is_closed == other.env.is_closed


@pytest.mark.parametrize("mode", [{}, {"flatten_data": True}], ids=["turns", "flat"])
def test_batched_environments(mode):
    def make(back: bool) -> Any:
        return SerialEnv(2, lambda: environment(lambda: Counting(None, 2), back))

    options = {"dialog_turns_per_batch": 4, "total_dialog_turns": 12} | mode
    ours, charged, mine = collect(LLMCollector, make(False), **options)
    theirs, torchrls, other = collect(TorchrlLLMCollector, make(True), **options)
    assert charged == torchrls and len(ours) == len(theirs) == 3
    for x, y in zip(ours, theirs, strict=True):
        assert_same(x, y)
    for collector in (mine, other):
        collector.shutdown(raise_on_error=False)


@pytest.mark.parametrize("mode", [{}, COMPLETED, LAST], ids=["turns", "completed", "last"])
def test_replay_buffers(mode):
    stored = []
    for cls, back in ((LLMCollector, False), (TorchrlLLMCollector, True)):
        buffer = ReplayBuffer(storage=LazyStackStorage(100), batch_size=4)
        env = environment(lambda: Counting(2, 2), back)
        options = {"dialog_turns_per_batch": 4, "total_dialog_turns": 20, "replay_buffer": buffer}
        batches, charged, _ = collect(cls, env, **options, **mode)
        assert set(batches) == {None}
        stored.append((charged, buffer[:]))
    (charged, ours), (torchrls, theirs) = stored
    assert charged == torchrls
    assert_same(ours, theirs)


@pytest.mark.parametrize("rows", [1, 3])
def test_trajectory_ids_are_those_of_torchrls_collector(rows):
    ours, _, _ = collect(
        LLMCollector,
        Counting(rows, 2),
        dialog_turns_per_batch=4 * rows,
        total_dialog_turns=12 * rows,
    )
    theirs = Collector(
        Counting(rows, 2),
        policy,
        frames_per_batch=4 * rows,
        total_frames=12 * rows,
        trust_policy=True,
        use_buffers=False,
    )
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x[IDS], y[IDS])


@pytest.mark.parametrize("stack", ["lazy", "dense"])
@pytest.mark.parametrize("mode", [COMPLETED, LAST], ids=["completed", "last"])
def test_each_dialog_of_a_pool(mode, stack):
    """Which dialog ends first is up to the threads: every environment's own are compared."""
    dialogs = []
    for cls, back in ((LLMCollector, False), (TorchrlLLMCollector, True)):
        makers = [partial(environment, partial(Counting, 1, n), back) for n in (2, 3)]
        pool = AsyncEnvPool(makers, backend="threading", stack=stack)
        own: dict[int, list[Any]] = {0: [], 1: []}
        collector = cls(pool, policy=policy, dialog_turns_per_batch=2, **mode)
        for batch in collector:
            own[batch["env_index"][0]].append(batch)
            if min(map(len, own.values())) >= 2:
                break
        collector.shutdown()
        dialogs.append(own)
    for index in (0, 1):
        for x, y in zip(dialogs[0][index][:2], dialogs[1][index][:2], strict=True):
            assert_same(x, y)


def test_whole_turns_of_a_pool():
    batches = []
    for cls, back in ((LLMCollector, False), (TorchrlLLMCollector, True)):
        makers = [partial(environment, partial(Counting, None, n), back) for n in (2, 3)]
        pool = AsyncEnvPool(makers, backend="threading", stack="lazy")
        batches.append(collect(cls, pool, dialog_turns_per_batch=4, total_dialog_turns=12)[:2])
    (ours, charged), (theirs, torchrls) = batches
    assert charged == torchrls
    for x, y in zip(ours, theirs, strict=True):
        assert_same(x, y)
