"""What workers do alike or not at all."""

from __future__ import annotations

import pytest
from engine_ranks import agree
from prepared import processes

from fusedrl.vllm.worker import Workers


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


def test_one_worker_raises_what_was_raised():
    def attempt():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        Workers(1, 0, None).all_or_none(attempt)
