"""What the other process does in the tests of channels on a GPU."""

from __future__ import annotations

import torch
from torch import nn

from fusedrl.channel import WeightChannel


def weights_of(version, numbers, device):
    """Weights that are their version, in every number."""
    return {name: torch.full((numbers,), float(version), device=device) for name in "abcd"}


def extremes(weights):
    """The least and the greatest number of all, on the current stream, not waited for."""
    tensors = [weights[name] for name in "abcd"]
    return torch.stack([x for t in tensors for x in (t.min(), t.max())])


def lease_many(pipe, handle, rounds):
    """Lease, compute on a stream of its own, release; the values are fetched at the very end."""
    seen = []
    with handle.open() as reader, torch.cuda.stream(torch.cuda.Stream()):
        pipe.send("open")
        for _ in range(rounds):
            with reader.lease() as lease:
                torch.cuda._sleep(2_000_000)  # about a millisecond: the release has to wait for it
                seen.append((lease.version, extremes(lease.weights)))
        values = [(version, sorted(set(found.tolist()))) for version, found in seen]
    pipe.send(values)


def attach(pipe, handle):
    """How much of the device's memory it takes to open a channel of that size."""
    torch.ones(1, device="cuda").sum().item()  # the context, and the kernel
    before = torch.cuda.mem_get_info()[0]
    with handle.open() as reader, reader.lease() as lease:
        total = lease.weights["a"].sum().item()
        pipe.send((before - torch.cuda.mem_get_info()[0], total))
        pipe.recv()


def alias(pipe, handle):
    """Load by alias: the memory it takes, and the module's answers at each version."""
    module = nn.Linear(1024, 1024, bias=False, device="cuda")
    x = torch.ones(1, 1024, device="cuda")
    module(x).sum().item()
    reader = handle.open()
    reader.load_into(module)
    allocated = torch.cuda.memory_allocated()
    while pipe.recv():
        version = reader.load_into(module)
        pipe.send((version, module(x).mean().item(), torch.cuda.memory_allocated() - allocated))
    reader.close()


def publish_slowly(pipe, numbers):
    """Publish a version, and begin to publish another after some seconds of work."""
    with WeightChannel.create(weights_of(1, numbers, "cuda")) as channel:
        channel.publish()
        pipe.send(channel.handle)
        pipe.recv()
        other = weights_of(2, numbers, "cuda")
        with channel.writing() as writing:
            torch._foreach_copy_(writing.views, [other[name] for name in "abcd"])
            torch.cuda._sleep(8_000_000_000)
            pipe.send("copying")
