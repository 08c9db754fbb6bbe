"""broadcast(): what readers of each rank lease, and that all ranks raise where one cannot."""

from __future__ import annotations

import contextlib

import broadcast_workers as workers
import pytest
import torch
from prepared import processes


class Ranks:
    """Two processes of a group, and readers of their channels in this one."""

    def __init__(self, store):
        pipes = [processes.Pipe() for _ in range(2)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            processes.Process(target=workers.run, args=(i, str(store), theirs), daemon=True)
            for i, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()
        self.readers = [handle.open() for handle in self.all("handle")]

    def tell(self, rank, name, *args, **options):
        self.pipes[rank].send((name, args, options))

    def answer(self, rank):
        assert self.pipes[rank].poll(60), "no answer"
        return self.pipes[rank].recv()

    def all(self, name, *args, **options):
        """The answers of both ranks, errors as they are."""
        for rank in range(2):
            self.tell(rank, name, *args, **options)
        return [self.answer(rank) for rank in range(2)]

    def broadcast(self, number, src=0, **options):
        """``src`` has weights, the other rank has none."""
        for rank in range(2):
            self.tell(rank, "broadcast", number if rank == src else None, src=src, **options)
        return [self.answer(rank) for rank in range(2)]

    def leased(self):
        """The version that readers of each rank get, and the number in its weights."""
        told = []
        for reader in self.readers:
            with reader.lease() as lease:
                values = {
                    float(x) for leaf in lease.weights.values(True, True) for x in leaf.unique()
                }
                told.append((lease.version, *values))
        return told

    def end(self):
        for reader in self.readers:
            reader.close()
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(None)
            process.join(20)
            process.kill()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(tmp_path_factory.mktemp("group") / "store")
    yield ranks
    ranks.end()


def newest(ranks) -> int:
    return max(reader.version or 0 for reader in ranks.readers)


@pytest.mark.parametrize("src", [0, 1])
def test_readers_of_all_ranks_lease_the_same_version(ranks, src):
    wanted = newest(ranks) + 1
    assert ranks.broadcast(3.0 + src, src) == [wanted, wanted]
    assert ranks.leased() == [(wanted, 3.0 + src)] * 2


def test_a_version_is_greater_than_that_of_every_channel(ranks):
    ranks.broadcast(1.0)
    ahead = newest(ranks) + 5
    ranks.tell(1, "publish", 9.0, ahead)
    assert ranks.answer(1) == ahead
    assert ranks.broadcast(2.0) == [ahead + 1] * 2
    assert ranks.broadcast(4.0, version=ahead + 10) == [ahead + 10] * 2
    for error in ranks.broadcast(5.0, version=ahead + 10):
        assert isinstance(error, ValueError)
        assert f"version: expected more than the {ahead + 10}" in str(error)
    assert ranks.leased() == [(ahead + 10, 4.0)] * 2


def test_weights_that_do_not_fit_raise_on_all_ranks(ranks):
    ranks.broadcast(1.0)
    before = ranks.leased()
    own, others = ranks.broadcast(2.0, size=7)
    assert isinstance(own, ValueError) and "a: expected float32 (1000,)" in str(own)
    assert isinstance(others, RuntimeError) and "rank 0: ValueError" in str(others)
    assert ranks.leased() == before


def test_a_source_that_does_not_exist_and_a_version_that_is_none_raise_on_all_ranks(ranks):
    for error in ranks.broadcast(1.0, src=7):
        assert isinstance(error, ValueError)
        assert "src: expected a rank of the group, one of [0, 1], got 7" in str(error)
    own, others = ranks.broadcast(1.0, version="x")
    assert isinstance(own, TypeError) and "version: expected an int, got str" in str(own)
    assert isinstance(others, RuntimeError) and "rank 0: TypeError" in str(others)


def test_channels_of_different_layouts_raise_on_all_ranks(ranks):
    for error in ranks.all("broadcast_between_layouts"):
        assert isinstance(error, ValueError) and "expected one layout on all ranks" in str(error)


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_without_a_free_slot_makes_all_raise(ranks, full):
    leases = []
    for number in range(3):
        ranks.broadcast(float(number))
        leases.append(ranks.readers[full].lease())
    before = ranks.leased()
    answers = ranks.broadcast(7.0, timeout=0.2)
    assert all(isinstance(answer, TimeoutError) for answer in answers)
    assert str(answers[1 - full]).endswith(f"(on rank {full})")
    assert ranks.leased() == before
    for lease in leases:
        lease.release()
    ranks.broadcast(8.0)
    assert [number for _, number in ranks.leased()] == [8.0, 8.0]


def test_nothing_is_published_where_a_rank_is_dead(tmp_path):
    ranks = Ranks(tmp_path / "store")
    ranks.broadcast(1.0)
    ranks.processes[1].kill()
    ranks.processes[1].join(20)
    ranks.tell(0, "broadcast", 2.0)
    late = ranks.answer(0)
    assert isinstance(late, TimeoutError) and "got none by rank 1; " in str(late)
    with ranks.readers[0].lease() as lease:
        assert lease.version == 1 and torch.all(lease.weights["a"] == 1)
    ranks.end()
