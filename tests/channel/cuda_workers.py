"""What other processes do in the tests of memory that processes share."""

from __future__ import annotations

import time

import torch
from channel.fake_driver import FakeDriver

from fusedrl.channel import WeightChannel, cuda


def publish_and_wait(pipe, nbytes):
    """Publish a slot of sevens, and live until told otherwise."""
    cuda._DRIVER = FakeDriver()
    memory = cuda.CudaMemory.create(torch.device("cuda:0"), 1, nbytes)
    memory.slot(0).fill_(7)
    pipe.send(memory.manifest)
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
        driver.synchronize(0)
        values = [
            (version, sorted({x for t in copies.values() for x in t.tolist()}))
            for version, copies in seen
        ]
    pipe.send((values, driver.violations, driver.calls["cuIpcOpenMemHandle_v2"]))


def publish_slowly(pipe, weights):
    """Publish weights, and begin to publish others in a second."""
    cuda._DRIVER = driver = FakeDriver()
    with WeightChannel.create(weights, device="cuda:0") as channel:
        channel.publish()
        pipe.send(channel.handle)
        pipe.recv()
        with channel.writing() as writing:
            sources = [torch.full_like(view, 2) for view in writing.views]
            for view, source in zip(writing.views, sources, strict=True):
                driver.copy(view.view(torch.uint8), source.view(torch.uint8), 1.0)
            pipe.send("copying")
