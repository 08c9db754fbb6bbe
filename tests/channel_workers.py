"""What the processes at the ends of a channel run, each told what to do through a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from prepared import processes
from tensordict import TensorDict
from torch import nn

from fusedrl import _host
from fusedrl.channel import WeightChannel


def weights_of(version: int, numbers: int = 4096) -> TensorDict:
    """Weights that are their version, in every number."""
    return TensorDict({name: torch.full((numbers,), float(version)) for name in "abcd"})


def model_of_zeros(numbers: int = 4096) -> nn.Module:
    """A module that such weights fit."""
    return nn.ParameterDict({name: torch.zeros(numbers) for name in "abcd"})


def publish(channel: WeightChannel, version: int | None = None, **options: Any) -> int | None:
    """Publish weights that are their version, the next one if it is not given."""
    number = (channel.version or 0) + 1 if version is None else version
    return channel.publish(weights_of(number), version, **options)


def version_in(weights: TensorDict) -> int:
    """The version that all numbers are; fails where they disagree."""
    found = {float(x) for value in weights.values() for x in (value.min(), value.max())}
    assert len(found) == 1, f"torn: {sorted(found)}"
    return int(found.pop())


@contextmanager
def process(run: Callable[..., None], *arguments: Any) -> Iterator[tuple[Any, Any]]:
    """A process that calls ``run(pipe, *arguments)``, and our end of its pipe."""
    ours, theirs = processes.Pipe()
    child = processes.Process(target=run, args=(theirs, *arguments), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


def publish_on_demand(pipe: Any, step: str, signal: int, options: dict[str, Any]) -> None:
    """Publish version 1, then one more at each message, getting ``signal`` at ``step``."""
    torch.set_num_threads(1)
    channel = WeightChannel.create(weights_of(0), **options)
    channel.publish(weights_of(1))
    pipe.send(channel.handle)
    while pipe.recv():
        if step:
            _host.signal_at(step, signal)
        pipe.send(channel.publish(weights_of((channel.version or 0) + 1)))


def lease_on_demand(pipe: Any, handle: Any, step: str, signal: int) -> None:
    """Lease and release once at each message, getting ``signal`` at ``step``."""
    torch.set_num_threads(1)
    if step:
        _host.signal_at(step, signal)
    with handle.open() as reader:
        pipe.send("open")
        while pipe.recv():
            with reader.lease() as lease:
                assert version_in(lease.weights) == lease.version
            pipe.send(lease.version)


def lease_and_hold(pipe: Any, handle: Any, fork: bool) -> None:
    """Hold a lease until killed; ``fork``: with a child that lives on, whose pid is sent."""
    torch.set_num_threads(1)
    reader = handle.open()
    lease = reader.lease()
    child = os.fork() if fork else 0
    if fork and child == 0:
        pipe.recv()
        os._exit(0)
    pipe.send((lease.version, child))
    pipe.recv()


def lease_all_the_time(pipe: Any, handle: Any, leases: int, versions: int) -> None:
    """Lease at least as often as told, and until as many versions were seen."""
    torch.set_num_threads(1)
    seen = set()
    with handle.open() as reader:
        pipe.send("open")
        while leases > 0 or len(seen) < versions:
            with reader.lease() as lease:
                assert version_in(lease.weights) == lease.version
                seen.add(lease.version)
            leases -= 1
    pipe.send("done")


def publish_and_fork(pipe: Any) -> None:
    """Publish a version, fork a child that lives on, and wait to be killed."""
    torch.set_num_threads(1)
    channel = WeightChannel.create(weights_of(0))
    channel.publish(weights_of(1))
    child = os.fork()
    if child:
        pipe.send((channel.handle, child))
    pipe.recv()


def run_code(pipe: Any, code: str, out: Path, err: Path) -> None:
    """Run Python code with its output in files."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    torch.set_num_threads(1)
    exec(code, {"__name__": "code"})
    sys.stdout.flush()
