"""What a publisher and its readers see of each other."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import channel_workers as workers
import programs
import pytest
import torch
from channel_workers import publish
from torch import nn

from fusedrl import _host
from fusedrl.channel import WeightChannel
from fusedrl.channel.reader import Lease


def test_versions_are_counted_from_one(channel, reader):
    assert channel.version is reader.version is None
    assert [publish(channel) for _ in range(3)] == [1, 2, 3]
    assert channel.version == reader.version == 3


@pytest.mark.parametrize("version", [3, 0, -1, 2**55])
def test_versions_only_grow(channel, reader, version):
    publish(channel, 3)
    with pytest.raises(ValueError, match="version: expected"):
        channel.publish(workers.weights_of(1), version)
    with reader.lease() as lease:
        assert workers.version_in(lease.weights) == lease.version == 3


def test_a_lease_keeps_its_version_while_others_are_published(channel, reader):
    publish(channel)
    with reader.lease() as first:
        for _ in range(10):
            publish(channel)
        with reader.lease() as last:
            assert (first.version, last.version) == (1, 11)
            assert workers.version_in(first.weights) == 1
            assert workers.version_in(last.weights) == 11


def test_threads_share_a_reader_and_a_slot_is_free_after_the_last_of_their_leases(channel, reader):
    publish(channel)
    leases = [reader.lease() for _ in range(3)]
    publish(channel)
    publish(channel)
    for lease in leases[:2]:
        lease.release()
        assert workers.version_in(leases[2].weights) == 1
        publish(channel)
    assert channel.readers()[0].leased == (1,)
    leases[2].release()
    assert channel.readers()[0].leased == ()


def shared(lease: Lease) -> Lease:
    other = Lease(of=lease)
    other.reader = lease.reader
    return other


def test_threads_that_release_one_lease_at_once_release_it_once(channel, reader):
    """A release too many would leave the next lease without a lock of the kernel."""
    publish(channel)
    current: list[Any] = []
    meet = threading.Barrier(3)

    def release() -> None:
        for _ in range(300):
            meet.wait()
            current[0].release()
            meet.wait()

    threads = [threading.Thread(target=release) for _ in range(2)]
    for thread in threads:
        thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            current[:] = [reader.lease()]
            with shared(current[0]) as other:
                meet.wait()
                meet.wait()
                assert not current[0].held and channel.readers()[0].leased == (other.version,)
                for _ in range(3):
                    publish(channel)
                assert workers.version_in(other.weights) == other.version
    finally:
        sys.setswitchinterval(before)
        meet.abort()
        for thread in threads:
            thread.join()


def test_without_a_free_slot_publishing_waits_or_names_the_reader(channel, reader):
    publish(channel)
    first = reader.lease()
    publish(channel)
    with reader.lease():
        publish(channel)
        with pytest.raises(TimeoutError, match=rf"pid {os.getpid()} holds versions \[1, 2\]"):
            publish(channel, timeout=0.05)
        releaser = threading.Timer(0.1, first.release)
        releaser.start()
        assert publish(channel, timeout=5) == 4
        releaser.join()


def test_a_lease_ends_with_its_block_or_with_its_reader(channel):
    publish(channel)
    with channel.handle.open() as reader:
        lease = reader.lease()
        with reader.lease() as ended:
            pass
        with pytest.raises(RuntimeError, match="version 1 after its release"):
            _ = ended.weights
    for _ in range(3):
        publish(channel)
    for each in (ended, lease):
        with pytest.raises(RuntimeError, match="got one that is closed"):
            _ = each.weights
        each.release()
        assert not each.held


def test_a_lease_that_is_dropped_is_given_back(channel, reader):
    publish(channel)
    lease = reader.lease()
    other = shared(lease)
    del lease
    assert channel.readers()[0].leased == (other.version,) == (1,)
    del other
    assert channel.readers()[0].leased == ()


def test_whoever_is_told_of_a_release_gives_the_slot_back(channel, reader, monkeypatch):
    give_back = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_host.give_back)
    publish(channel)
    given, shown = [], []

    def refuse(lease: int) -> None:
        given.append(lease)
        raise KeyError

    lease = reader.lease()
    lease.before_release = given.append
    with shared(lease):
        lease.release()
        lease.release()
        assert len(given) == 1 and not lease.held
    assert len(given) == 2  # shares are told of too
    give_back(given.pop())
    assert channel.readers()[0].leased == (1,)
    thread = threading.Thread(target=give_back, args=given)
    thread.start()
    thread.join()
    assert channel.readers()[0].leased == ()

    monkeypatch.setattr("sys.unraisablehook", lambda error: shown.append(error.exc_type))
    lease = reader.lease()
    lease.before_release = refuse
    with pytest.raises(KeyError):
        lease.release()
    lease = reader.lease()
    lease.before_release = refuse
    del lease
    assert shown == [KeyError] and len(given) == 3
    assert channel.readers()[0].leased == (1,)  # until the reader closes


def test_leases_wait_for_the_version_they_are_asked_for(channel, reader):
    later = threading.Timer(0.1, publish, [channel])
    later.start()
    with reader.lease(timeout=5) as lease:
        assert lease.version == 1
    later.join()
    later = threading.Timer(0.1, publish, [channel, 9])
    later.start()
    with reader.lease(min_version=5, timeout=5) as lease:
        assert lease.version == 9
    later.join()
    with pytest.raises(TimeoutError, match=r"version: expected 10 or later within 0.05 s, got 9"):
        reader.lease(min_version=10, timeout=0.05)


def test_every_wait_is_finite(channel, reader, monkeypatch):
    for wait in (
        lambda: reader.lease(timeout=float("inf")),
        lambda: reader.wait_for(1, timeout=-1),
        lambda: publish(channel, timeout=float("nan")),
    ):
        with pytest.raises(ValueError, match="timeout: expected a finite number"):
            wait()
    publish(channel)
    monkeypatch.setattr("fusedrl.channel.reader.Lease", lambda end: SimpleNamespace(held=False))
    with pytest.raises(TimeoutError, match=r"within 0.0 s, got another one at each attempt"):
        reader.lease(timeout=0)


def test_publishing_within_a_publish_ends(channel):
    with channel.writing() as writing:
        for view, source in zip(writing.views, workers.weights_of(1).values(), strict=True):
            view.copy_(source)
        with pytest.raises(TimeoutError, match="got none of 3: another publish or writing block"):
            publish(channel, timeout=0.05)
    assert publish(channel) == 2


def test_the_version_that_is_written_can_only_be_raised(channel):
    publish(channel, 3)
    with channel.writing() as writing:
        for number in (2, 2**60):
            with pytest.raises(ValueError, match="version: expected 4 to"):
                writing.version = number
        writing.version = 7
    assert channel.version == 7


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("fusedrl-channel")


def test_memory_goes_when_an_end_closes_and_no_tensor_is_over_it():
    gc.collect()
    before, model = mapped(), workers.model_of_zeros()
    channel = WeightChannel.create(workers.weights_of(0))
    publish(channel)
    reader, kept = channel.handle.open(), []
    with reader.lease() as lease:
        kept.append(lease.weights["a"])
    del lease
    reader.load_into(model)
    reader.close()
    channel.close()
    assert channel.version == reader.version == 1 and mapped() == before + 1
    kept.clear()
    assert mapped() == before


def test_a_closed_channel_is_still_read_but_not_waited_for():
    channel = WeightChannel.create(workers.weights_of(0))
    publish(channel)
    reader = channel.handle.open()
    channel.close()
    channel.close()
    with reader.lease() as lease:
        assert workers.version_in(lease.weights) == 1
    with pytest.raises(RuntimeError, match=rf"pid {os.getpid()}\) closed the channel"):
        reader.wait_for(2)
    with pytest.raises(RuntimeError, match="closed"):
        publish(channel)
    with pytest.raises(RuntimeError, match="expected a running publisher"):
        channel.handle.open()
    reader.close()
    reader.close()
    with pytest.raises(RuntimeError, match="closed"):
        reader.lease()


def test_there_are_at_most_max_readers():
    with WeightChannel.create(workers.weights_of(0), max_readers=2) as channel:
        readers = [channel.handle.open() for _ in range(2)]
        with pytest.raises(RuntimeError, match="fewer than 2 open readers"):
            channel.handle.open()
        readers[0].close()
        channel.handle.open().close()
        readers[1].close()


def test_the_publisher_sees_what_a_reader_computes_with(channel, reader):
    publish(channel)
    assert channel.readers()[0].applied is None
    reader.lease().release()
    assert channel.readers()[0].applied == 1
    publish(channel)
    assert channel.readers()[0].applied == 1
    reader.load_into(workers.model_of_zeros())
    assert channel.readers()[0].applied == 2


def test_weights_of_another_layout_are_refused_before_anything_changes(channel, reader):
    publish(channel)
    wrong = workers.weights_of(2)
    wrong["b"] = torch.zeros(3)
    with pytest.raises(ValueError, match="b"):
        channel.publish(wrong)
    with reader.lease() as lease:
        assert workers.version_in(lease.weights) == lease.version == 1
    assert publish(channel) == 2


def test_publishing_finds_what_a_module_has_by_now():
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with WeightChannel.create(model) as channel, channel.handle.open() as reader:

        def published() -> list[float]:
            channel.publish()
            with reader.lease() as lease:
                linear, norm = lease.weights["0"], lease.weights["1"]
                return [float(linear["bias"]), float(norm["bias"]), float(norm["running_mean"])]

        model[0].bias.data = torch.tensor([1.0])
        assert published()[0] == 1
        model[0].bias = nn.Parameter(torch.tensor([2.0]))
        assert published()[0] == 2
        model[1].running_mean = torch.tensor([3.0])
        assert published()[2] == 3
        model[1] = nn.BatchNorm1d(1)
        model[1].bias.data.fill_(4)
        assert published() == [2, 4, 0]
        model[0].bias.data = torch.zeros(2)
        with pytest.raises(ValueError, match=r"0\.bias"):
            channel.publish()
        model[0].bias.data = torch.tensor([5.0]).double()
        assert published()[0] == 5
        model[0].extra = nn.Parameter(torch.zeros(1))
        with pytest.raises(ValueError, match=r"0\.extra"):
            channel.publish()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 1}, "slots: expected 2 to 64, got 1"),
        ({"slots": True}, "slots: expected an int"),
        ({"timeout": float("inf")}, "timeout: expected a finite number"),
        ({"max_readers": 0}, "max_readers: expected 1 to"),
        ({"dtype": "bfloat16"}, "dtype: expected a float of 16 bits or more"),
        ({"device": "meta"}, "device: expected cpu or cuda, got meta"),
    ],
)
def test_what_a_channel_cannot_be_made_from(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        WeightChannel.create(workers.weights_of(0), **options)


@pytest.mark.heavy
def test_four_readers_never_see_half_a_version():
    with WeightChannel.create(workers.weights_of(0)) as channel:
        publish(channel)
        with ExitStack() as stack:
            started = (
                workers.process(workers.lease_all_the_time, channel.handle, 1000, 50)
                for _ in range(4)
            )
            pipes = [stack.enter_context(process)[1] for process in started]
            assert [pipe.recv() for pipe in pipes] == ["open"] * 4
            while not all(pipe.poll() for pipe in pipes):
                with suppress(TimeoutError):
                    publish(channel, timeout=0)
            assert [pipe.recv() for pipe in pipes] == ["done"] * 4


def memory() -> tuple[int, int]:
    mapped = int(Path("/proc/self/statm").read_text().split()[0])
    return len(list(Path("/proc/self/fd").iterdir())), mapped


@pytest.mark.heavy
def test_files_and_memory_stay_flat():
    with WeightChannel.create(workers.weights_of(0)) as channel:
        weights = workers.weights_of(1)
        for _ in range(50):
            channel.publish(weights)
            channel.handle.open().close()
        gc.collect()  # what other tests have left
        before = memory()
        for _ in range(10_000):
            channel.publish(weights)
        for _ in range(1_000):
            with channel.handle.open() as reader, reader.lease():
                pass
        after = memory()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 1000  # pages; a mapping of one reader has more than ten


@pytest.mark.heavy
def test_the_interpreter_ends_while_a_thread_waits():
    code = """
import threading, time, torch
from fusedrl import WeightChannel
channel = WeightChannel.create({"a": torch.zeros(1)})
reader = channel.handle.open()
threading.Thread(target=reader.wait_for, args=(1,), daemon=True).start()
time.sleep(0.1)
"""
    ended = programs.python("-c", code, taken_apart=True)
    assert (ended.returncode, ended.stderr) == (0, "")
