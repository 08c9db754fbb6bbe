"""Batches in shared memory: what one process packs another one uses where it lies."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prepared import processes
from shared_batch_workers import open_files, pack_on_request, ragged
from tensordict import TensorDict, lazy_stack

from fusedrl.collectors.process import shared_batches
from fusedrl.collectors.process.messages import post, receive
from fusedrl.collectors.process.shared_batches import Mappings, Segments

MAPS = Path("/proc/self/maps")


class Ends:
    """Both ends in one process."""

    def __init__(self) -> None:
        self.segments, self.mappings = Segments(), Mappings()

    def send(self, batch: Any) -> Any:
        return self.mappings.unpack(*self.segments.pack(batch))


@pytest.fixture
def ends() -> Ends:
    return Ends()


def mapped_at(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a segment."""
    for line in MAPS.read_text().splitlines():
        if "fusedrl-batch" in line:
            start, end = (int(x, 16) for x in line.split()[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return True
    return False


def segments_mapped() -> int:
    return MAPS.read_text().count("fusedrl-batch")


def tokens(batch: Any) -> list[list[int]]:
    return [row["tokens"].tolist() for row in batch.unbind(0)]


def test_every_tensor_lies_in_the_segment_and_can_be_written_to(ends):
    batch = TensorDict(
        dense=torch.ones(2, 3),
        jagged=torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        rows=lazy_stack([TensorDict(x=torch.ones(n, 2, n)) for n in (1, 2)]),
        batch_size=(2,),
    )
    got = ends.send(batch)
    leaves = [got["dense"], got["jagged"].values(), *(row["x"] for row in got["rows"].unbind(0))]
    for leaf in leaves:
        assert mapped_at(leaf) and leaf.eq(1).all()
        leaf.zero_()
    assert not got["dense"].any()
    assert not mapped_at(batch["dense"])


@pytest.mark.parametrize(
    "keep",
    [
        lambda batch: batch[3]["tokens"],
        lambda batch: batch[3]["tokens"][1:2],
        lambda batch: batch[3]["tokens"].numpy()[::2],
        lambda batch: memoryview(batch[3]["tokens"].numpy()),
        lambda batch: batch[2:4],
        lambda batch: batch[3]["tokens"].float().requires_grad_() * batch[3]["tokens"],
    ],
    ids=["tensor", "slice", "array", "buffer", "rows", "graph"],
)
def test_a_segment_is_in_use_while_anything_over_it_is(ends, keep):
    kept = keep(ends.send(ragged()))
    gc.collect()
    assert ends.mappings.released() == []
    assert ends.segments.pack(ragged(first=50))[0][0] == 1
    del kept
    gc.collect()
    assert ends.mappings.released() == [0]
    ends.segments.release([0])
    assert ends.segments.pack(ragged())[0][0] == 0


def test_a_batch_that_is_too_large_for_a_free_segment_gets_one(ends):
    kept = ends.send(ragged())
    for length in (1000, 1_000_000, 1000):
        got = ends.send(TensorDict(x=torch.arange(length)))
        assert torch.equal(got["x"], torch.arange(length))
        del got
        ends.segments.release(ends.mappings.released())
    assert tokens(kept) == tokens(ragged()) and segments_mapped() == 2 * 3


def test_the_memory_of_many_free_segments_is_given_back(ends):
    big = TensorDict(x=torch.ones(2**20, dtype=torch.uint8))
    batches = [ends.send(big) for _ in range(10)]
    assert segments_mapped() == 2 * 10
    del batches
    ends.segments.release(ends.mappings.released())
    assert ends.send(big)["x"].eq(1).all()
    assert segments_mapped() == 2 * (shared_batches.SPARE + 1)
    for _ in range(10):
        assert ends.send(big)["x"].eq(1).all()


def test_batches_that_are_kept_survive_both_ends(ends):
    batches = [ends.send(ragged(first=n)) for n in range(5)]
    del ends.mappings, ends.segments
    assert [tokens(b) for b in batches] == [tokens(ragged(first=n)) for n in range(5)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_a_pickle_or_a_copy_of_a_tensor_has_nothing_of_the_others(ends, dtype):
    got = ends.send(
        TensorDict(
            scalar=torch.ones((), dtype=dtype),
            small=torch.ones(3, 2, dtype=dtype),
            big=torch.ones(100_000, dtype=dtype),
            nested=torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
            rows=lazy_stack([TensorDict(x=torch.ones(n, 2, n)) for n in (1, 2)]),
        )
    )
    small = got.select("scalar", "small", "nested", "rows")
    for pickled in (pickle.dumps(small), pickle.dumps(copy.deepcopy(small))):
        assert len(pickled) < 20_000
        assert torch.equal(pickle.loads(pickled)["small"], got["small"])
    file = io.BytesIO()
    torch.save([got["scalar"], got["small"], got["nested"].values()], file)
    assert file.tell() < 5_000
    assert mapped_at(got["small"]) and got["scalar"].shape == () and got["scalar"] == 1


class Worker:
    """A process that packs batches."""

    def __init__(self) -> None:
        gc.collect()  # files of what other tests left are closed before these are counted
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.process = processes.Process(target=pack_on_request, args=(theirs,))
        self.process.start()
        theirs.close()
        self.mappings = Mappings()
        self.descriptors: list[int] = []

    def shared(self, *arguments: int) -> tuple[Any, int | None]:
        post(self.end, arguments, self.mappings.released())
        (shared, descriptors), descriptor = receive(self.end)
        self.descriptors.append(descriptors)
        return shared, descriptor

    def batch(self, *arguments: int) -> Any:
        return self.mappings.unpack(*self.shared(*arguments))


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    if made.process.is_alive():
        made.process.kill()
    made.process.join()
    made.end.close()


@pytest.mark.heavy
def test_nothing_is_left_of_many_batches(worker):
    worker.batch()
    before = open_files()
    for n in range(100):
        assert worker.batch(3, n)[2]["tokens"][0] == 100 * (n + 2)
    kept = [worker.batch(3, n) for n in range(100)]
    assert [batch[0]["tokens"][0] for batch in kept] == [*range(0, 10_000, 100)]
    assert open_files() == before
    del kept
    assert worker.descriptors[-1] == worker.descriptors[0]
    pids = str(os.getpid()), str(worker.process.pid)
    named = [path.name for path in Path("/dev/shm").iterdir()]
    assert not [name for name in named if any(pid in name.split("_") for pid in pids)]
    post(worker.end)
    worker.process.join()
    assert worker.process.exitcode == 0
    del worker.mappings
    assert "fusedrl-batch" not in MAPS.read_text()


@pytest.mark.heavy
def test_batches_outlive_a_worker_that_is_killed(worker):
    batches = [worker.batch(4, n) for n in range(4)]
    lost = worker.shared(4, 9)
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.join()
    assert [tokens(b) for b in batches] == [tokens(ragged(4, n)) for n in range(4)]
    batches[0][1]["tokens"].fill_(7)
    assert batches[0][1]["tokens"].tolist() == [7, 7]
    assert tokens(worker.mappings.unpack(*lost)) == tokens(ragged(4, 9))
