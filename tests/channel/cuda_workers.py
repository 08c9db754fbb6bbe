"""What other processes do in the tests of memory that processes share."""

from __future__ import annotations

from channel.fake_driver import FakeDriver

from fusedrl.channel.cuda import CudaMemory


def read_slot(pipe, manifest, devices, seconds):
    """Lease, copy on a stream of its own, release: the copy and what the driver was asked for."""
    import torch

    driver = FakeDriver(devices)
    memory = CudaMemory.open(manifest, driver=driver)
    with driver.stream(7):
        slot = memory.slot(0)
        seen = torch.zeros_like(slot)
        memory.before_read(0)
        driver.copy(seen, slot, seconds)
        released = memory.after_read(0)
        pipe.send(released())
    driver.drain()
    del slot
    memory.close()
    pipe.send((seen.tolist(), released(), driver.violations, driver.balance()))


def publish_and_wait(pipe, nbytes):
    """Publish a slot of sevens, and live until told otherwise."""
    driver = FakeDriver()
    memory = CudaMemory.create("cuda:0", 1, nbytes, driver=driver)
    memory.before_write(0)
    memory.slot(0).fill_(7)
    memory.after_write(0)
    driver.drain()
    pipe.send(memory.manifest())
    pipe.recv()
