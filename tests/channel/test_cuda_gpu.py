"""Channels on a real GPU, between two processes. ``make gpu`` runs them."""

from __future__ import annotations

import multiprocessing
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from channel import gpu_workers as workers
from torch import nn

from fusedrl.channel import WeightChannel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SPAWN = multiprocessing.get_context("spawn")
LIMIT = 120.0
NUMBERS = 1 << 24  # 64 MiB a tensor


@contextmanager
def process(run, *arguments):
    """A process that calls ``run(pipe, *arguments)``, and a way to hear from it."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=run, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()

    def hear():
        assert ours.poll(LIMIT), "the other process does not answer"
        return ours.recv()

    try:
        yield child, ours, hear
    finally:
        child.kill()
        child.join()


def test_another_process_sees_whole_versions_while_they_are_overwritten():
    rounds = 200
    with WeightChannel.create(workers.weights_of(0, NUMBERS, "cuda")) as channel:
        sources = [workers.weights_of(v, NUMBERS, "cuda") for v in range(1, 5)]
        channel.publish(sources[0])
        with process(workers.lease_many, channel.handle, rounds) as (_, pipe, hear):
            assert hear() == "open"
            deadline = time.monotonic() + LIMIT
            while not pipe.poll() and time.monotonic() < deadline:
                with suppress(TimeoutError):
                    channel.publish(sources[(channel.version or 0) % 4], timeout=0)
            seen = hear()
    assert len(seen) == rounds
    assert len({version for version, _ in seen}) > 1
    assert [found for _, found in seen] == [[float((v - 1) % 4 + 1)] for v, _ in seen]


def test_a_thousand_versions_take_no_more_memory_than_one():
    weights = workers.weights_of(1, 1 << 16, "cuda")
    with WeightChannel.create(weights) as channel, channel.handle.open() as reader:
        for version in range(1000):
            if version == 10:
                torch.cuda.current_stream().synchronize()
                before = torch.cuda.mem_get_info()[0]
            channel.publish(weights)
            with reader.lease() as lease:
                assert lease.version == version + 1
        torch.cuda.current_stream().synchronize()
        assert before - torch.cuda.mem_get_info()[0] <= 2 << 20


def test_closed_channels_give_their_memory_back():
    weights = workers.weights_of(1, NUMBERS, "cuda")
    before = torch.cuda.mem_get_info()[0]
    for _ in range(5):
        with WeightChannel.create(weights) as channel, channel.handle.open() as reader:
            channel.publish()
            with reader.lease() as lease:
                total = lease.weights["a"].sum().item()
        del channel, reader, lease
        assert total == NUMBERS
    assert before - torch.cuda.mem_get_info()[0] <= 8 << 20


def test_a_reader_takes_no_memory_of_the_size_of_the_weights():
    weights = workers.weights_of(3, NUMBERS, "cuda")  # 256 MiB, 3 slots
    with WeightChannel.create(weights) as channel:
        channel.publish()
        with process(workers.attach, channel.handle) as (_, pipe, hear):
            taken, total = hear()
            pipe.send("end")
    assert total == 3.0 * NUMBERS
    assert taken <= 32 << 20


def test_alias_gives_a_module_each_version_without_a_copy():
    trained = nn.Linear(1024, 1024, bias=False, device="cuda")
    with WeightChannel.create(trained) as channel:
        channel.publish({"weight": torch.zeros(1024, 1024, device="cuda")})
        with process(workers.alias, channel.handle) as (_, pipe, hear):
            for version in range(2, 12):
                number = float(version)
                channel.publish({"weight": torch.full((1024, 1024), number, device="cuda")})
                pipe.send("load")
                assert hear() == (version, 1024 * number, 0)
            pipe.send(None)


@pytest.fixture
def small():
    """A channel of small weights, with its first version, and a reader."""
    weights = workers.weights_of(1, 1 << 16, "cuda")
    with WeightChannel.create(weights) as channel, channel.handle.open() as reader:
        channel.publish()
        yield channel, reader


def test_a_version_is_published_when_its_copies_are_done_and_waits_for_no_other_stream(small):
    channel, reader = small
    done, other = torch.cuda.Event(), torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.cuda._sleep(8_000_000_000)  # seconds

    def publish():
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(400_000_000)
            done.record()
            channel.publish()

    thread = threading.Thread(target=publish)
    thread.start()
    while reader.version == 1:
        time.sleep(0.001)
    assert done.query()
    thread.join()
    assert not other.query()


def test_two_copies_of_a_tied_weight_are_compared_behind_what_writes_them():
    tied = torch.zeros(1 << 20, device="cuda")
    with WeightChannel.create({"embedding": tied, "head": tied}) as channel:
        for apart in (0.0, 1.0):
            copies = {"embedding": tied.clone(), "head": tied.clone()}
            torch.cuda._sleep(400_000_000)
            copies["embedding"].fill_(3.0)
            copies["head"].fill_(3.0 + apart)
            if apart:
                with pytest.raises(ValueError, match=r"(?s)embedding.*head|head.*embedding"):
                    channel.publish(copies)
            else:
                channel.publish(copies)
        with channel.handle.open() as reader, reader.lease() as lease:
            assert lease.version == 1
            assert lease.weights["head"].unique().tolist() == [3.0]


def test_a_thousand_leases_on_several_streams_are_all_given_back(small):
    channel, reader = small
    streams = [torch.cuda.Stream() for _ in range(4)]
    gate = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)
    gate.record()
    for i in range(1000):
        with torch.cuda.stream(streams[i % 4]):
            if i < 4:
                gate.wait()
            with reader.lease() as lease:
                lease.weights["a"].sum()
    assert channel.readers()[0].leased == (1,) or gate.query()
    torch.cuda.synchronize()
    assert channel.readers()[0].leased == ()


def test_a_publisher_that_is_killed_in_a_copy_leaves_the_former_version():
    """Also where nobody else has the memory than the reader that had opened it."""
    with (
        process(workers.publish_slowly, NUMBERS) as (child, pipe, hear),
        hear().open() as reader,
    ):
        pipe.send("copy")
        assert hear() == "copying"
        child.kill()
        child.join()
        with reader.lease() as lease:
            assert lease.version == 1
            assert workers.extremes(lease.weights).unique().tolist() == [1.0]


def test_no_lease_is_taken_or_ends_while_a_graph_is_captured(small):
    channel, reader = small
    graph, x, held = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda"), reader.lease()
    with torch.cuda.graph(graph):
        y = x + 1
        with pytest.raises(RuntimeError, match="CUDA graph"):
            reader.lease()
        with pytest.raises(RuntimeError, match="CUDA graph"):
            held.release()
    graph.replay()
    with reader.lease() as lease:
        assert lease.version == 1
    assert y.tolist() == [2.0] * 4
    assert channel.readers()[0].leased == (1,)
    reader.close()
    assert channel.readers() == []


def test_another_threads_channel_does_not_invalidate_a_capture(small):
    x, graph, made = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph(), []

    def create_and_lease():
        with small[1].lease():
            pass
        made.append(WeightChannel.create({"a": x}))

    with torch.cuda.graph(graph):
        y = x + 1
        thread = threading.Thread(target=create_and_lease)
        thread.start()
        thread.join()
    graph.replay()
    assert y.tolist() == [2.0] * 4
    made.pop().close()
