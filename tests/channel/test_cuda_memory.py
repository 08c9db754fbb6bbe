"""CudaMemory over a driver that runs on the CPU: what is ordered, mapped, closed and refused."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch
from channel import cuda_workers
from channel.fake_driver import FakeDriver
from prepared import processes

from fusedrl import _host
from fusedrl.channel import cuda
from fusedrl.channel.cuda import CudaMemory

NBYTES = 4096
NOTHING = (0, 0, 0)


@pytest.fixture(autouse=True)
def _no_wait_for_a_device(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("waited for a device")

    for name in ("synchronize", "Stream.synchronize", "Event.synchronize"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)


@pytest.fixture
def publisher():
    return FakeDriver()


@pytest.fixture
def reader():
    return FakeDriver()


def create(driver, slots=1):
    return CudaMemory.create("cuda:0", slots, NBYTES, driver=driver)


def open_elsewhere(memory, driver):
    """As another process opens it."""
    manifest = json.loads(json.dumps(memory.manifest()))
    return CudaMemory.open(manifest | {"process": "another"}, driver=driver)


def filled(value):
    return torch.full((NBYTES,), value, dtype=torch.uint8)


def publish(memory, driver, value, seconds=0.0, stream=1):
    with driver.stream(stream):
        memory.before_write(0)
        driver.copy(memory.slot(0), filled(value), seconds)
        memory.after_write(0)


def read(memory, driver, seconds=0.0, stream=2):
    """The bytes that a reader's stream sees, once it ran, and the poll of the lease's end."""
    seen = filled(0)
    with driver.stream(stream):
        memory.before_read(0)
        driver.copy(seen, memory.slot(0), seconds)
        return seen, memory.after_read(0)


def balance_of(*drivers):
    """What drivers have left once the memory of dropped slots was given back."""
    cuda._wait_for_dropped_memory()
    return [driver.balance() for driver in drivers]


def finish(*drivers):
    for driver in drivers:
        driver.drain()
        assert driver.violations == []


def test_a_device_out_of_sight_is_refused_by_its_uuid(publisher):
    memory = create(publisher)
    with pytest.raises(RuntimeError, match=r"UUID gpu-a, got \['gpu-b'\].*device='cpu'"):
        open_elsewhere(memory, FakeDriver(["gpu-b"]))
    with pytest.raises(RuntimeError, match=r"UUID gpu-a, got none"):
        open_elsewhere(memory, FakeDriver([]))


def test_the_publishers_own_process_uses_the_memory_as_it_is(publisher):
    memory = create(publisher)
    here = CudaMemory.open(memory.manifest(), driver=publisher)
    assert here.slot(0).data_ptr() == memory.slot(0).data_ptr()
    publish(memory, publisher, 5, seconds=0.1)
    seen, _ = read(here, publisher)
    finish(publisher)
    assert seen.tolist() == [5] * NBYTES
    assert publisher.calls["open"] == publisher.calls["open_event"] == 0


def test_an_export_opened_often_is_opened_once_and_closed_once(publisher, reader):
    memory = create(publisher, slots=2)
    opened = [open_elsewhere(memory, reader) for _ in range(5)]
    assert reader.calls["open"] == 2
    view = opened[3].slot(1)[7:].view(-1)
    for each in opened:
        each.close()
    assert balance_of(reader)[0][1] == reader.calls["close"] == 1  # slot 0 has no tensor left
    del view
    assert balance_of(reader) == [NOTHING]


def test_views_outlive_close_on_both_sides(publisher, reader):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    publish(memory, publisher, 5)
    publisher.drain()
    views = [memory.slot(0)[:8], there.slot(0)[8:16].view(torch.int16)]
    memory.close()
    there.close()
    assert views[0].tolist() == [5] * 8
    assert views[1].view(torch.uint8).tolist() == [5] * 8
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert balance_of(publisher, reader) == [NOTHING, NOTHING]


def test_memory_stays_while_a_stream_works_with_it(publisher, reader):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    publish(memory, publisher, 5, seconds=0.2)
    seen, _ = read(there, reader, seconds=0.2)
    there.close()
    memory.close()
    (allocated, _, _), (_, opened, _) = balance_of(publisher, reader)
    assert allocated == opened == 1
    finish(publisher, reader)
    assert seen.tolist() == [5] * NBYTES
    deadline = time.monotonic() + 5  # no later call is needed
    while publisher.balance()[0] or reader.balance()[1]:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("side", ["publisher", "reader"])
def test_whoever_drops_a_slot_does_not_wait_for_the_driver(publisher, reader, monkeypatch, side):
    """Which may wait for the device until it unmaps memory."""
    driver, name = (publisher, "free") if side == "publisher" else (reader, "close_memory")
    device_is_done, give_back = threading.Event(), getattr(driver, name)

    def waits(*slot):
        assert device_is_done.wait(5)
        give_back(*slot)

    monkeypatch.setattr(driver, name, waits)
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    memory.close()
    there.close()
    assert driver.calls["free"] == driver.calls["close"] == 0
    device_is_done.set()
    assert balance_of(publisher, reader) == [NOTHING, NOTHING]


def test_slots_that_readers_may_still_use_are_not_freed(publisher, reader, caplog):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    publish(memory, publisher, 5)
    publisher.drain()
    memory.close(in_use_by=[1])
    assert "the processes 1 may still read them" in caplog.text
    assert publisher.calls["free"] == 0
    assert there.slot(0).tolist() == [5] * NBYTES
    with pytest.raises(RuntimeError, match="closed"):
        memory.slot(0)


@pytest.mark.heavy
def test_a_publisher_that_is_gone_is_refused(reader):
    ours, theirs = processes.Pipe()
    child = processes.Process(target=cuda_workers.publish_and_wait, args=(theirs, NBYTES))
    child.start()
    manifest = ours.recv()
    there = CudaMemory.open(manifest, driver=reader)
    assert there.slot(0).tolist() == [7] * NBYTES
    child.kill()
    child.join()
    assert there.slot(0).tolist() == [7] * NBYTES
    del there
    with pytest.raises(RuntimeError, match="gone"):
        CudaMemory.open(manifest, driver=reader)


def test_the_fake_has_the_methods_of_the_driver():
    ours = {name for name in dir(_host.CudaDriver) if not name.startswith("_")}
    assert ours <= set(dir(FakeDriver))
