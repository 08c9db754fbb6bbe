"""Turns of policies and environments that write into the same memory again."""

from __future__ import annotations

import pickle
import random
import time
from functools import partial

import pytest
import torch
import torchrl.collectors.llm
from counting_dialogs import Counting, Numbers, policy
from tensordict import lazy_stack
from torchrl.data import Unbounded
from torchrl.envs import AsyncEnvPool

from fusedrl import LLMCollector

IDS = ("collector", "traj_ids")
POOLS = {
    "threads": {"backend": "threading", "stack": "lazy"},
    "threads, dense": {"backend": "threading", "stack": "dense"},
    "processes": {"backend": "multiprocessing", "stack": "lazy"},
    "processes, slots": {"backend": "multiprocessing", "stack": "lazy", "exchange": "shm"},
}
MODES = [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}]


class LateBuffers(Counting):
    """Returns new tensors for some turns, then the same one every second turn.

    One that writes into what it is given while it steps is in no collector's power.
    """

    def _step(self, tensordict):
        state = super()._step(tensordict)
        if self.steps > 6:
            buffer = self.__dict__.setdefault(f"buffer {self.steps % 2}", state["seen"].clone())
            state.set("seen", buffer.copy_(state["seen"]))
        return state


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_policy_with_a_buffer(collect, mode, lazy):
    options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 24} | mode
    buffer = torch.zeros(2, 1, dtype=torch.int64)

    def writing(turn):
        for row in turn.unbind(0):
            n = int(row["seen"].item() != turn["seen"][0].item())
            row.set("action", buffer[n])
        buffer.copy_(10 * turn["seen"])
        return turn if lazy else turn.set("action", buffer)

    whole, kept = (
        [batch["action"].flatten().tolist() for batch in collect(env, policy=by, **options)]
        for env, by in ((Counting(2, 5, lazy), policy), (Counting(2, 5, lazy), writing))
    )
    assert whole == kept


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_environment_with_buffers(collect, mode):
    options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 36} | mode
    keys = ("seen", ("next", "seen"), "done", ("next", "done"), IDS)
    whole, kept = (
        [[batch[key].tolist() for key in keys] for batch in collect(env, **options)]
        for env in (Counting(2, 5), LateBuffers(2, 5))
    )
    assert whole == kept


def test_a_batch_shares_no_memory_with_the_environment(collect):
    made = []

    def remembering(turn):
        made.append(policy(turn)["action"])
        return turn

    batch = collect(policy=remembering, dialog_turns_per_batch=16).next()
    for action in made:
        action.fill_(-1)
    assert (batch["action"] >= 0).all()


class Wide(Numbers):
    """Its observations have eight more entries, of ``[16, 32]`` a row."""

    def __init__(self, rows: int | None = 64, lazy: bool = False) -> None:
        super().__init__(rows, 2, lazy)
        shape = (*self.batch_size, 16, 32)
        self.wide = {f"wide {n}": torch.rand(shape) for n in range(8)}
        for key, value in self.wide.items():
            self.observation_spec[key] = Unbounded(value.shape)

    def _state(self, **more):
        return super()._state(**more, **self.wide)


LOOPS = {
    "turns, dense": Wide,
    "turns, lazy": partial(Wide, lazy=True),
    "pool": lambda: AsyncEnvPool([partial(Wide, None)] * 8, **POOLS["threads, dense"]),
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    "mode", [*MODES, {"yield_only_last_steps": True, "dialog_turns_per_batch": 32}], ids=str
)
def test_a_row_pickles_to_the_size_of_torchrls(loop, mode):
    sizes = []
    for kind in (LLMCollector, torchrl.collectors.llm.LLMCollector):
        made = kind(LOOPS[loop](), policy=policy, **{"dialog_turns_per_batch": 64} | mode)
        sizes.append(len(pickle.dumps(next(iter(made)).reshape(-1)[0])))
        made.shutdown()
    assert sizes[0] <= 1.2 * sizes[1]


class Taking(Numbers):
    """Says which action it took, after a while."""

    def __init__(self, seed: int, turns: int) -> None:
        super().__init__(1, turns)
        self.observation_spec["taken"] = Unbounded((1, 1), dtype=torch.int64)
        self.draw, self.taken = random.Random(seed), torch.zeros(1, 1, dtype=torch.int64)

    def _state(self, **more):
        return super()._state(**more).set("taken", self.taken.clone())

    def _step(self, tensordict):
        time.sleep(self.draw.uniform(0, 0.002))
        self.taken = tensordict["action"].clone()
        time.sleep(self.draw.uniform(0, 0.002))
        return super()._step(tensordict)


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind", [*list(POOLS)[:2], *(pytest.param(k, marks=pytest.mark.slow) for k in list(POOLS)[2:])]
)
@pytest.mark.usefixtures("forked_pools")
def test_the_action_of_a_turn_is_the_one_that_the_environment_took(collect, kind, seed):
    """The policy writes into the actions that it has returned while environments step."""
    draw, written = random.Random(seed), []

    def writing(turn):
        seen = turn["seen"].clone()
        for tensor in written:
            tensor.fill_(-1)
        time.sleep(draw.uniform(0, 0.001))
        rows = list(turn.unbind(0))
        for row in rows:
            written.append(row.set("action", 10 * row["seen"])["action"])
        answer = turn.set("action", 10 * seen) if draw.random() < 0.5 else lazy_stack(rows)
        written.extend(row["action"] for row in answer.unbind(0))
        del written[:-12]
        return answer

    makers = [partial(Taking, seed + n, draw.randint(1, 4)) for n in range(3)]
    pool = AsyncEnvPool(makers, **POOLS[kind])
    collector = collect(pool, policy=writing, yield_completed_trajectories=True)
    batches = [collector.rollout() for _ in range(8)]
    rows = [row for batch in batches for row in batch.reshape(-1).unbind(0)]
    said = [[int(row[key]) for key in ("action", ("next", "taken"))] for row in rows]
    assert [pair for pair in said if pair[0] != pair[1]] == []
    assert all(int(row["action"]) == 10 * int(row["seen"]) for row in rows)
