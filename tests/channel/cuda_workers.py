"""What other processes do in the tests of memory that processes share."""

from __future__ import annotations

import time

import torch
from channel.fake_driver import FakeDriver

from fusedrl.channel import cuda
from fusedrl.channel.cuda import CudaMemory


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


def lease_many(pipe, handle, devices, rounds):
    """Lease, copy slowly on a stream of its own and release, again and again: what was seen."""
    driver = FakeDriver(devices)
    cuda._DRIVER = driver
    seen = []
    with handle.open() as reader, driver.stream(7):
        pipe.send("open")
        for _ in range(rounds):
            with reader.lease() as lease:
                copies = {name: torch.zeros_like(t) for name, t in lease.weights.items()}
                for name, tensor in lease.weights.items():
                    bytes_of = copies[name].view(torch.uint8), tensor.view(torch.uint8)
                    driver.copy(*bytes_of, seconds=0.002)
                seen.append((lease.version, copies))
            time.sleep(0.01)
        driver.drain()
        values = [
            (version, sorted({x for t in copies.values() for x in t.tolist()}))
            for version, copies in seen
        ]
    pipe.send((values, driver.violations, driver.calls["open"]))
