"""The channel over slots of a GPU, played by a driver that runs on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from channel import cuda_workers
from channel.fake_driver import FakeDriver, Launched
from prepared import processes

from fusedrl.channel import WeightChannel, cuda
from fusedrl.channel.following import Follower

NAMES = "abcd"


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "_DRIVER", driver)
    yield driver
    driver.drain()
    assert driver.violations == []


def weights(version, numbers=512):
    return {name: torch.full((numbers,), float(version)) for name in NAMES}


def publish(channel, driver, version, seconds=0.0):
    with driver.stream(1), Launched(driver, seconds):
        channel.publish(weights(version), version)


def read(lease, driver, seconds=0.0):
    """The values that the current stream will have seen once it ran."""
    copies = {name: torch.zeros(512) for name in NAMES}
    for name, copy in copies.items():
        driver.copy(copy.view(torch.uint8), lease.weights[name].view(torch.uint8), seconds)
    return copies


def values(copies):
    return {x for copy in copies.values() for x in copy.tolist()}


def test_a_version_that_is_still_being_copied_is_leased_whole(driver):
    with (
        WeightChannel.create(weights(0), device="cuda:1") as channel,
        channel.handle.open() as reader,
        driver.stream(2),
    ):
        publish(channel, driver, 1, seconds=0.05)
        with reader.lease() as lease:
            copies = read(lease, driver)
        driver.drain()
    assert values(copies) == {1.0}


def test_the_copies_of_a_publish_that_raises_come_before_those_of_the_next(driver):
    """They are queued already, and the next publish writes the same slot from another stream."""

    def write(value: float, seconds: float) -> None:
        with channel.writing() as writing:
            for view in writing.views:
                source = torch.full_like(view, value)
                driver.copy(view.view(torch.uint8), source.view(torch.uint8), seconds)
            if value < 0:
                raise KeyError

    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
    ):
        publish(channel, driver, 1)
        with pytest.raises(KeyError), driver.stream(3):
            write(-1.0, 0.05)
        with driver.stream(1):
            write(2.0, 0.0)
        driver.drain()
        with driver.stream(2), reader.lease() as lease:
            copies = read(lease, driver)
        driver.drain()
        assert lease.version == 2 and values(copies) == {2.0}


def test_a_slot_is_not_written_before_all_threads_that_share_a_call_have_computed(driver):
    """Each thread computes on a stream of its own, and the one that is slow ends its call first."""
    modules = [torch.nn.Linear(8, 4) for _ in range(2)]
    ours, policy = modules
    with (
        WeightChannel.create(ours, device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
    ):
        follower = Follower(reader, policy, "copy")
        with driver.stream(1):
            channel.publish(version=1)
        driver.drain()
        seen = torch.zeros(32)
        with follower.call():

            def call():
                with driver.stream(5), follower.call():
                    source = follower._running().lease.views[0].view(-1)
                    driver.copy(seen.view(torch.uint8), source.view(torch.uint8), 0.1)

            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        expected = ours.weight.detach().flatten().clone()
        with torch.no_grad():
            ours.weight.fill_(7)
        for version in (2, 3):  # 3 needs the slot of 1
            with driver.stream(1):
                channel.publish(version=version)
        driver.drain()
        follower.close()
    assert torch.equal(seen, expected)


def test_a_slot_is_not_written_before_the_reader_has_computed_with_it(driver):
    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
        driver.stream(2),
    ):
        publish(channel, driver, 1)
        driver.drain()
        with reader.lease() as lease:
            copies = read(lease, driver, seconds=0.05)
        for version in (2, 3):  # 3 needs the slot of 1
            publish(channel, driver, version)
        driver.drain()
    assert values(copies) == {1.0}


@pytest.mark.heavy
def test_another_process_reads_whole_versions_of_a_device_that_it_counts_differently(driver):
    rounds = 20
    with WeightChannel.create(weights(0), device="cuda:1") as channel:
        publish(channel, driver, 1)
        ours, theirs = processes.Pipe()
        arguments = theirs, channel.handle, ("gpu-b",), rounds
        child = processes.Process(target=cuda_workers.lease_many, args=arguments)
        child.start()
        assert ours.recv() == "open"
        version = 1
        while not ours.poll(0.005):
            version += 1
            publish(channel, driver, version, seconds=0.002)
        seen, violations, opened = ours.recv()
        child.join()
    assert len(seen) == rounds
    assert all(found == [float(version)] for version, found in seen)
    assert len({version for version, _ in seen}) > 1
    assert violations == []
    assert opened == 3  # a slot


def test_no_lease_begins_while_a_graph_is_captured(driver):
    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2, timeout=1.0) as channel,
        channel.handle.open() as reader,
    ):
        publish(channel, driver, 1)
        driver.is_capturing = True
        for _ in range(3):
            with pytest.raises(RuntimeError, match="CUDA graph"):
                reader.lease()
            with pytest.raises(RuntimeError, match="CUDA graph"):
                channel.publish(weights(2))
        driver.is_capturing = False
        for version in (2, 3, 4):  # no slot was lost
            publish(channel, driver, version)
        with reader.lease() as lease:
            assert lease.version == 4
