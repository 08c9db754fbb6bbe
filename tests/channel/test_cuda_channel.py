"""The channel over slots of a GPU, played by a driver that runs on the CPU."""

from __future__ import annotations

import threading

import pytest
import torch
from channel import cuda_workers
from channel.fake_driver import FakeDriver, Launched
from prepared import processes

from fusedrl.channel import WeightChannel, cuda

NAMES = "abcd"


@pytest.fixture
def driver(monkeypatch):
    driver = FakeDriver()
    monkeypatch.setattr(cuda, "_DRIVER", driver)
    yield driver
    driver.synchronize(0)
    assert driver.violations == []


def test_what_a_gpu_refuses_is_said_with_the_size_that_was_wanted(driver):
    driver.room = 0
    wanted = r"expected 3 slots of .* on cuda:0, got 'fake driver: out of memory'; use fewer slots"
    with pytest.raises(RuntimeError, match=wanted):
        WeightChannel.create(weights(0), device="cuda:0")


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


def test_a_version_that_is_still_being_copied_is_not_published_yet(driver):
    during = []
    with (
        WeightChannel.create(weights(0), device="cuda:1") as channel,
        channel.handle.open() as reader,
    ):
        for version in (1, 2):
            with driver.stream(1), channel.writing() as writing:
                sources = [torch.full_like(view, version) for view in writing.views]
                for view, source in zip(writing.views, sources, strict=True):
                    driver.copy(view.view(torch.uint8), source.view(torch.uint8), 0.02)
                driver.launch(lambda: during.append(reader.version))
        with driver.stream(2), reader.lease() as lease:
            copies = read(lease, driver)
    assert during == [None, 1] and lease.version == 2
    assert values(copies) == {2.0}


def test_the_copies_of_a_publish_that_raises_come_before_those_of_the_next(driver):
    """They are queued already, and the next publish writes the same slot from another stream."""

    def write(value: float, seconds: float) -> None:
        with channel.writing() as writing:
            for view, source in zip(writing.views, sources[value], strict=True):
                driver.copy(view.view(torch.uint8), source.view(torch.uint8), seconds)
            if value < 0:
                raise KeyError

    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
    ):
        publish(channel, driver, 1)
        like = channel._views[0]
        sources = {value: [torch.full_like(x, value) for x in like] for value in (-1.0, 2.0)}
        with pytest.raises(KeyError), driver.stream(3):
            write(-1.0, 0.05)
        with driver.stream(1):
            write(2.0, 0.0)
        with driver.stream(2), reader.lease() as lease:
            copies = read(lease, driver)
        driver.synchronize(0)
        assert lease.version == 2 and values(copies) == {2.0}


def test_a_slot_is_not_written_before_all_threads_that_share_a_call_have_computed(driver):
    """Each thread computes on a stream of its own, and the one that is slow ends its call first."""
    modules = [torch.nn.Linear(8, 4) for _ in range(2)]
    ours, policy = modules
    with (
        WeightChannel.create(ours, device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
    ):
        follower = reader.follow(policy, "copy")
        with driver.stream(1):
            channel.publish(version=1)
        seen = torch.zeros(32)
        with follower.call():

            def call():
                with driver.stream(5), follower.call():
                    source = follower._running().value.views[0].view(-1)
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
        follower.close()
    assert torch.equal(seen, expected)


def test_a_slot_is_not_written_before_the_reader_has_computed_with_it(driver):
    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
        driver.stream(2),
    ):
        publish(channel, driver, 1)
        with reader.lease() as lease:
            copies = read(lease, driver, seconds=0.05)
        for version in (2, 3):  # 3 needs the slot of 1
            publish(channel, driver, version)
    assert values(copies) == {1.0}


def test_a_thousand_leases_end_in_the_order_of_their_streams(driver):
    """And none before its stream has come to it, or the last one too late."""
    released, ended, gates = [], [], [threading.Event() for _ in range(4)]
    run = driver.cuLaunchHostFunc

    def launched(device, stream, function, lease):
        released.append((stream.value, lease.value))
        run(device, stream, function, lease)
        driver.launch(lambda: ended.append((stream.value, lease.value)))

    driver.cuLaunchHostFunc = launched
    with (
        WeightChannel.create(weights(0), device="cuda:0") as channel,
        channel.handle.open() as reader,
    ):
        publish(channel, driver, 1)
        for stream, gate in enumerate(gates, start=2):
            with driver.stream(stream):
                driver.launch(gate.wait)
        for i in range(1000):
            with driver.stream(2 + i % 4), reader.lease():
                pass
        for gate in gates:
            assert channel.readers()[0].leased == (1,)
            gate.set()
        driver.synchronize(0)
        assert channel.readers()[0].leased == ()
    assert len(set(released)) == len(ended) == 1000
    for stream in range(2, 6):
        assert [e for e in ended if e[0] == stream] == [r for r in released if r[0] == stream]


def test_a_reader_closes_after_the_work_under_its_leases(driver):
    with (
        WeightChannel.create(weights(0), device="cuda:0", slots=2) as channel,
        channel.handle.open() as reader,
    ):
        publish(channel, driver, 1)
        with driver.stream(2):
            lease = reader.lease()
            copies = read(lease, driver, seconds=0.05)
        reader.close()
        assert values(copies) == {1.0} and not lease.held
        lease.release()
    assert driver.calls["cuLaunchHostFunc"] == 0


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


def test_a_lease_that_ends_in_a_capture_stays_until_its_reader_closes(driver):
    with WeightChannel.create(weights(0), device="cuda:0", timeout=0.2) as channel:
        publish(channel, driver, 1)
        with channel.handle.open() as reader:
            lease = reader.lease()
            driver.is_capturing = True
            with pytest.raises(RuntimeError, match="CUDA graph"):
                lease.release()
            driver.is_capturing = False
            lease.release()
            assert channel.readers()[0].leased == (1,)
        assert channel.readers() == []
    assert driver.calls["cuLaunchHostFunc"] == 0


@pytest.mark.heavy
def test_a_publisher_that_is_killed_in_a_copy_leaves_the_former_version(driver):
    ours, theirs = processes.Pipe()
    child = processes.Process(target=cuda_workers.publish_slowly, args=(theirs, weights(1)))
    child.start()
    with ours.recv().open() as reader:
        ours.send("copy")
        assert ours.recv() == "copying"
        child.kill()
        child.join()
        with driver.stream(2), reader.lease() as lease:
            copies = read(lease, driver)
        with pytest.raises(RuntimeError, match="is dead"):
            reader.wait_for(2)
    assert lease.version == 1 and values(copies) == {1.0}
