"""Turns of policies and environments that write into the same memory again."""

from __future__ import annotations

import random
import time
from functools import partial

import pytest
import torch
from counting_dialogs import Counting, Numbers, policy, seen
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data import Unbounded
from torchrl.data.llm import History
from torchrl.envs import AsyncEnvPool

from fusedrl.collectors.turn_data import TurnCopies

IDS = ("collector", "traj_ids")
MODES = [{}, {"flatten_data": True}, {"yield_completed_trajectories": True}]


class Buffered(Counting):
    """Writes what its steps return into the same tensors."""

    def _step(self, tensordict):
        state = super()._step(tensordict)
        for key in ("seen", "done", "terminated"):
            buffer = self.__dict__.setdefault(f"written {key}", state[key].clone())
            state.set(key, buffer.copy_(state[key]))
        return state


class LateBuffers(Counting):
    """Returns new tensors for some turns, then the same one every second turn."""

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
@pytest.mark.parametrize("kind", [Buffered, LateBuffers])
def test_an_environment_with_buffers(collect, kind, mode):
    options = {"dialog_turns_per_batch": 12, "total_dialog_turns": 36} | mode
    keys = ("seen", ("next", "seen"), "done", ("next", "done"), IDS)
    whole, kept = (
        [[batch[key].tolist() for key in keys] for batch in collect(env, **options)]
        for env in (Counting(2, 5), kind(2, 5))
    )
    assert whole == kept


def test_a_policy_that_keeps_what_it_was_given_and_writes_there_later(collect):
    given = []

    def late(turn):
        if given:
            given[-1]["action"].fill_(-1)
            given[-1]["seen"].fill_(-1)
        given.append(policy(turn))
        return given[-1]

    options = {"dialog_turns_per_batch": 16, "total_dialog_turns": 32}
    whole, kept = (
        [[batch[key].tolist() for key in ("seen", "action")] for batch in collect(**how, **options)]
        for how in ({}, {"policy": late})
    )
    assert whole == kept


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_policy_that_returns_one_tensordict_for_all_turns(collect, mode):
    answer = Counting(2, 3).reset()

    def same(turn):
        return answer.update(policy(turn))

    options = {"dialog_turns_per_batch": 8, "total_dialog_turns": 16} | mode
    keys = ("seen", "action")
    whole, kept = (
        [
            [batch[key].tolist() for key in keys]
            for batch in collect(Counting(2, 3), **how, **options)
        ]
        for how in ({}, {"policy": same})
    )
    assert whole == kept


@pytest.mark.usefixtures("forked_pools")
def test_a_pool_of_processes_with_shared_slots(collect):
    makers = [partial(Numbers, None, 5) for _ in range(2)]
    pool = AsyncEnvPool(makers, backend="multiprocessing", stack="lazy", exchange="shm")
    batch = collect(pool, dialog_turns_per_batch=20).next()
    assert seen(batch) == [[*range(100, 105), *range(200, 205)]] * 2
    assert seen(batch["next"]) == [[*range(101, 106), *range(201, 206)]] * 2


def test_a_batch_shares_no_memory_with_the_environment(collect):
    made = []

    def remembering(turn):
        made.append(policy(turn)["action"])
        return turn

    batch = collect(policy=remembering, dialog_turns_per_batch=16).next()
    for action in made:
        action.fill_(-1)
    assert (batch["action"] >= 0).all()


class TestWithoutCopies:
    """For those that reuse nothing."""

    def test_turns_are_what_the_policy_returned(self, collect):
        made = []

        def remembering(turn):
            made.append(policy(turn)["action"])
            return turn

        batch = collect(policy=remembering, dialog_turns_per_batch=16, copy_turns=False).next()
        kept = [batch[:, n]["action"].data_ptr() for n in range(8)]
        assert kept == [action.data_ptr() for action in made]

    @pytest.mark.parametrize("mode", [{}, {"yield_completed_trajectories": True}], ids=str)
    def test_one_tensordict_for_two_turns_is_refused(self, collect, mode):
        answers = []

        def forgetful(turn):
            answers.append(policy(turn))
            return answers[0]

        with pytest.raises(RuntimeError, match="copy_turns: expected a tensordict of its own"):
            list(collect(Counting(2, 3, lazy=True), policy=forgetful, copy_turns=False, **mode))


class TestCopies:
    """Copies know the private layout of tensordict's classes, which a release may change."""

    def test_of_chats(self):
        chats = [[{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]] * 2
        turn = TensorDict(history=History.from_chats(chats), batch_size=2).to_lazystack(0)
        copy = TurnCopies().after(turn)
        assert copy["history"].content == turn["history"].content
        copy["history"].tensordicts[0].content = ["other", "words"]
        assert turn["history"].content[0] == ["2?", "4"]

    def test_of_stacks_of_several_lengths(self):
        rows = [TensorDict(ids=torch.arange(n), text=f"of {n}") for n in (1, 3)]
        turn, copies = lazy_stack(rows), TurnCopies()
        copies.before(turn)
        rows[1]["ids"].fill_(7)
        rows[1]["text"] = "another"
        rows[1]["more"] = torch.ones(1)
        later = copies.after(turn)
        assert [row.tolist() for row in later.get("ids", as_list=True)] == [[0], [0, 1, 2]]
        assert later[1]["more"].tolist() == [1]
        assert later[1]["text"] == "another"  # it is another one, not the same written into

    def test_of_names_and_devices(self):
        turn = TensorDict(a=torch.ones(2), batch_size=2, names=["dialog"], device="cpu")
        copy = TurnCopies().after(turn)
        assert copy.names == ["dialog"] and copy.device == turn.device and not copy.is_locked
        assert TurnCopies().after(turn.lock_()).set("b", torch.ones(2)) is not None

    def test_of_what_shares_memory(self):
        flags = torch.zeros(2, 1, dtype=torch.bool)
        turn, copies = TensorDict(done=flags, terminated=flags, batch_size=2), TurnCopies()
        copies.before(turn)
        flags.fill_(True)
        made = copies.after(turn)
        made["done"].logical_not_()
        assert made["done"].all() and not made["terminated"].any()

    @pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
    def test_of_columns_that_differ_from_row_to_row(self, lazy):
        rows = [
            TensorDict(a=torch.ones(1), n=TensorDict(b=torch.ones(2))),
            TensorDict(a=torch.ones(1, dtype=torch.int64), n=TensorDict(b=torch.ones(300))),
            TensorDict(a=torch.ones(2), c=torch.ones(()), n=TensorDict(b=torch.zeros(2))),
        ]
        turn = lazy_stack(rows) if lazy else TensorDict(rows=lazy_stack(rows), batch_size=3)
        made = TurnCopies().after(turn)
        for row, copy in zip(rows, (made if lazy else made.get("rows")).tensordicts, strict=True):
            assert copy.keys() == row.keys() and copy["a"].dtype == row["a"].dtype
            assert torch.equal(copy["a"], row["a"]) and torch.equal(copy["n", "b"], row["n", "b"])
            assert copy["n", "b"].data_ptr() != row["n", "b"].data_ptr()


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_environment_that_writes_into_a_nested_entry_with_the_name_next(collect, mode, lazy):
    class Writing(Counting):
        def _step(self, tensordict):
            for row in tensordict.unbind(0):
                row["info", "next"].fill_(-1)
            return super()._step(tensordict)

    def planning(turn):
        info = TensorDict({"next": 10 * turn["seen"]}, turn.batch_size)
        return policy(turn).set("info", info.to_lazystack(0) if lazy else info)

    batch = collect(Writing(2, 5, lazy), policy=planning, **mode).next()
    assert torch.equal(batch["info", "next"], 10 * batch["seen"])


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_rows_have_objects_of_their_own(collect, mode):
    def planning(turn):
        return policy(turn).set("plan", NonTensorData([0], batch_size=turn.batch_size))

    batch = collect(Counting(3, 2), policy=planning, **{"dialog_turns_per_batch": 9} | mode).next()
    for n, row in enumerate(batch.unbind(0)):
        row.get("plan").data.append(n)
    assert [row.get("plan").data for row in batch.unbind(0)] == [[0, n] for n in range(len(batch))]


@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_environment_that_appends_to_a_list(collect, mode, lazy):
    class Logging(Counting):
        """Returns the same list at every step, which grows."""

        def _state(self, **more):
            log = self.__dict__.setdefault("log", [])
            log.append(len(log))
            logs = [NonTensorData(log) for _ in range(2)]
            self.lazy, before = False, self.lazy
            state = super()._state(**more).set("log", NonTensorStack(*logs))
            self.lazy = before
            return state.to_lazystack(0) if before else state

    def logs(batch):
        return [len(row["next"].get("log").data) for row in batch.reshape(-1).unbind(0)]

    collector = collect(
        Logging(2, 5, lazy), **{"dialog_turns_per_batch": 12, "total_dialog_turns": 24} | mode
    )
    batch = collector.next()
    before = logs(batch)
    assert len(set(before)) > 3  # not as the list is by now
    collector.next()
    assert logs(batch) == before


def test_entries_of_a_batch_share_no_memory(collect):
    batch = collect(dialog_turns_per_batch=16).next()
    before = batch[IDS].clone()
    batch["collector"].apply_(lambda ids: ids.add_(100))
    assert (batch[IDS] == before + 100).all()


def test_a_change_of_an_entry_is_no_change_of_another():
    """Autograd would refuse to differentiate what it saved of the others."""
    copy = TurnCopies().after(lazy_stack([TensorDict({"x": torch.ones(2)}, []) for _ in range(8)]))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * copy[1]["x"]).sum()
    copy[2]["x"].add_(1)
    loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


class Taking(Numbers):
    """Says which action it took, after a while, and may then write into what it was given."""

    def __init__(self, seed: int, turns: int, writes: bool) -> None:
        super().__init__(1, turns)
        self.observation_spec["taken"] = Unbounded((1, 1), dtype=torch.int64)
        self.draw, self.taken = random.Random(seed), torch.zeros(1, 1, dtype=torch.int64)
        self.writes = writes

    def _state(self, **more):
        return super()._state(**more).set("taken", self.taken.clone())

    def _step(self, tensordict):
        time.sleep(self.draw.uniform(0, 0.002))
        self.taken = tensordict["action"].clone()
        time.sleep(self.draw.uniform(0, 0.002))
        for key in ("action", "seen") if self.writes else ():
            tensordict[key].fill_(-5)
        return super()._step(tensordict)


POOLS = {
    "threads": {"backend": "threading", "stack": "lazy"},
    "threads, dense": {"backend": "threading", "stack": "dense"},
    "processes": {"backend": "multiprocessing", "stack": "lazy"},
    "processes, slots": {"backend": "multiprocessing", "stack": "lazy", "exchange": "shm"},
}
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

    writes = kind == "threads"  # other pools return other tensors than they were given
    makers = [partial(Taking, seed + n, draw.randint(1, 4), writes) for n in range(3)]
    pool = AsyncEnvPool(makers, **POOLS[kind])
    collector = collect(pool, policy=writing, yield_completed_trajectories=True)
    batches = [collector.rollout() for _ in range(8)]
    rows = [row for batch in batches for row in batch.reshape(-1).unbind(0)]
    said = [[int(row[key]) for key in ("action", ("next", "taken"))] for row in rows]
    assert [pair for pair in said if pair[0] != pair[1]] == []
    assert all(int(row["action"]) == 10 * int(row["seen"]) for row in rows)
