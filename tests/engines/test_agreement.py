"""What workers do alike or not at all, and why only the last of them raises."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from engine_ranks import agree, outlive
from prepared import processes

from fusedrl.vllm.agreement import Ranks


@pytest.mark.parametrize("failing", [[], [0], [1], [2], [0, 2], [0, 1, 2]])
def test_one_failure_is_the_failure_of_all(tmp_path, failing):
    pipes = []
    for rank in range(3):
        ours, theirs = processes.Pipe()
        arguments = theirs, tmp_path / "store", rank, 3, failing
        processes.Process(target=agree, args=arguments, daemon=True).start()
        pipes.append(ours)
    outcomes = [pipe.recv() for pipe in pipes]
    assert [gathered for _, gathered in outcomes] == [[0, 1, 2]] * 3
    if not failing:
        assert [value for value, _ in outcomes] == ["value 0", "value 1", "value 2"]
        return
    said = "; ".join(f"worker {rank}: ValueError: no {rank}" for rank in failing)
    assert [value for value, _ in outcomes] == ["None", "None", said]


def test_a_worker_whose_other_has_ended_says_what_to_do(tmp_path):
    ours, theirs = processes.Pipe()
    for rank in range(2):
        arguments = theirs, tmp_path / "store", rank
        processes.Process(target=outlive, args=arguments, daemon=True).start()
    assert ours.poll(60), "it waits for the other one"
    assert "start a new engine" in ours.recv()


def test_one_worker_raises_what_was_raised():
    def attempt():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Ranks(1, 0, None).all_or_none(attempt)


class Workers:
    """The queues of vLLM's executor, with workers that answer at once.

    Args:
        raising: which of them raise at the call ``"fail"``.
    """

    def __init__(self, raising):
        self.raising = raising
        self.is_failed = False
        self.futures_queue = deque()
        self.rpc_broadcast_mq = SimpleNamespace(enqueue=self.answer)
        self.answers = deque(), deque()
        self.response_mqs = [SimpleNamespace(dequeue=self.reader_of(a)) for a in self.answers]

    def reader_of(self, answers):
        return lambda timeout: answers.popleft()

    def answer(self, asked):
        from vllm.v1.executor.multiproc_executor import WorkerProc

        status = WorkerProc.ResponseStatus
        for rank, answers in enumerate(self.answers):
            failed = asked[0] == "fail" and rank in self.raising
            answers.append((status.FAILURE if failed else status.SUCCESS, asked[0]))

    def call(self, method):
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor.collective_rpc(self, method)


@pytest.mark.parametrize(
    ("raising", "late"),
    [((0,), True), ((0, 1), True), ((1,), False)],
    ids=["first", "both", "last"],
)
def test_vllm_stays_in_step_with_its_workers_if_none_but_the_last_raises(raising, late):
    workers = Workers(raising)
    with pytest.raises(RuntimeError, match="fail"):
        workers.call("fail")
    workers.rpc_broadcast_mq.enqueue(("next",))
    answers = [answers.popleft()[1] for answers in workers.answers]
    assert answers == ["next", "fail" if late else "next"]
