"""CudaMemory over a driver that runs on the CPU: what is mapped, closed and refused."""

from __future__ import annotations

import gc
import json
import os
import threading

import pytest
import torch
from channel import cuda_workers
from channel.fake_driver import FakeDriver
from prepared import processes

from fusedrl.channel import cuda
from fusedrl.channel.cuda import CudaMemory

NBYTES = 4096


@pytest.fixture
def publisher():
    return FakeDriver()


@pytest.fixture
def reader():
    return FakeDriver()


@pytest.fixture
def use(monkeypatch):
    """A function that makes a driver the one that memory is made with from here on."""
    return lambda driver: monkeypatch.setattr(cuda, "_DRIVER", driver)


@pytest.fixture
def create(use):
    def create(driver, slots=1):
        use(driver)
        return CudaMemory.create(torch.device("cuda:0"), slots, NBYTES)

    return create


@pytest.fixture
def open_elsewhere(use):
    """As another process opens it."""

    def open_elsewhere(memory, driver):
        use(driver)
        return CudaMemory.open(json.loads(json.dumps(memory.manifest | {"pid": 0})))

    return open_elsewhere


def test_a_device_out_of_sight_is_refused_by_its_uuid(publisher, create, open_elsewhere):
    memory = create(publisher)
    with pytest.raises(RuntimeError, match=r"UUID gpu-a, got \['gpu-b'\].*device='cpu'"):
        open_elsewhere(memory, FakeDriver(["gpu-b"]))
    with pytest.raises(RuntimeError, match=r"UUID gpu-a, got none"):
        open_elsewhere(memory, FakeDriver([]))


def test_the_publishers_own_process_uses_the_memory_as_it_is(publisher, create):
    memory = create(publisher)
    here = CudaMemory.open(memory.manifest)
    memory.slot(0).fill_(5)
    memory.close()
    del memory
    assert here.slot(0).tolist() == [5] * NBYTES
    assert publisher.calls["cuIpcOpenMemHandle_v2"] == 0


def test_readers_close_each_slot_as_often_as_they_opened_it(
    publisher, reader, create, open_elsewhere
):
    memory = create(publisher, slots=2)
    opened = [open_elsewhere(memory, reader) for _ in range(5)]
    assert reader.balance() == (0, 10)
    view = opened[3].slot(1)[7:].view(-1)
    for each in opened:
        each.close()
    assert reader.balance() == (0, 1)
    del view
    assert reader.balance() == (0, 0)


def test_views_outlive_close_on_both_sides(publisher, reader, create, open_elsewhere):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    memory.slot(0).fill_(5)
    views = [memory.slot(0)[:8], there.slot(0)[8:16].view(torch.int16)]
    memory.close()
    there.close()
    assert views[0].tolist() == [5] * 8
    assert views[1].view(torch.uint8).tolist() == [5] * 8
    thread = threading.Thread(target=views.clear)
    thread.start()
    thread.join()
    assert publisher.balance() == reader.balance() == (0, 0)


def test_memory_is_given_back_when_its_device_has_done_all_work(
    publisher, reader, create, open_elsewhere
):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    memory.slot(0).fill_(5)
    seen = torch.zeros(NBYTES, dtype=torch.uint8)
    with reader.stream(2):
        reader.copy(seen, there.slot(0), seconds=0.1)
    there.close()
    memory.close()
    assert seen.tolist() == [5] * NBYTES
    assert publisher.violations == reader.violations == []
    assert publisher.balance() == reader.balance() == (0, 0)


def test_what_is_dropped_in_a_capture_or_a_child_stays(publisher, create):
    memories = [create(publisher) for _ in range(2)]
    publisher.is_capturing = True
    memories.pop().close()
    publisher.is_capturing = False
    child = os.fork()
    if child == 0:
        memories.pop().close()
        os._exit(publisher.calls["cuMemFree_v2"])
    assert os.waitpid(child, 0)[1] == 0
    assert publisher.balance() == (2, 0)


def test_too_little_memory_leaves_none(publisher, create):
    publisher.room = 2 * (2 << 20)
    with pytest.raises(RuntimeError, match="out of memory"):
        create(publisher, slots=3)
    gc.collect()
    assert publisher.calls["cuMemAlloc_v2"] == 3
    assert publisher.balance() == (0, 0)


def test_slots_that_readers_may_still_use_are_not_freed(
    publisher, reader, create, open_elsewhere, caplog
):
    memory = create(publisher)
    there = open_elsewhere(memory, reader)
    memory.slot(0).fill_(5)
    memory.close(in_use_by=[1])
    del memory
    assert "the processes 1 may still read them" in caplog.text
    assert publisher.balance() == (1, 0)
    assert there.slot(0).tolist() == [5] * NBYTES


@pytest.mark.heavy
def test_a_publisher_that_is_gone_is_refused(reader, use):
    ours, theirs = processes.Pipe()
    child = processes.Process(target=cuda_workers.publish_and_wait, args=(theirs, NBYTES))
    child.start()
    manifest = ours.recv()
    use(reader)
    there = CudaMemory.open(manifest)
    assert there.slot(0).tolist() == [7] * NBYTES
    child.kill()
    child.join()
    assert there.slot(0).tolist() == [7] * NBYTES
    del there
    with pytest.raises(RuntimeError, match="gone"):
        CudaMemory.open(manifest)


def test_the_fake_has_the_methods_of_the_driver():
    ours = {name for name in vars(cuda._Driver) if not name.startswith("_")}
    assert ours <= set(dir(FakeDriver))
